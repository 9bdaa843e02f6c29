#include "lab.cuh"
using namespace flashinfer;
using namespace flashinfer::cuda;
using B = bfloat16_t;
extern const LabEntry list_e[] = {
    entry<B, 4, 16, 3, 2, kTick | kFast | kTimes, 16, 128>("times 4w2b"),
    entry<B, 8, 16, 3, 1, kTick | kFast | kTimes | kTables | kEvict | kGuess, 16, 256>("times 8w1b"),
    {}};
