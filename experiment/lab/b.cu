#include "lab.cuh"
using namespace flashinfer;
using namespace flashinfer::cuda;
using B = bfloat16_t;
extern const LabEntry list_b[] = {
    entry<B, 8, 16, 3, 1, kTick | kFast, 16, 256>("tickfast 8w1b s16"),
    entry<B, 4, 16, 3, 2, kTick | kFast | kTables | kEvict | kGuess, 16, 128>("+tables,evict,guess 4w2b"),
    entry<B, 8, 16, 3, 1, kTick | kFast | kTables | kEvict | kGuess, 16, 256>("+tables,evict,guess 8w1b"),
    {}};
