#include "lab.cuh"
using namespace flashinfer;
using namespace flashinfer::cuda;
using B = bfloat16_t;
using E = fp8_e4m3_t;
extern const LabEntry list_a[] = {
    entry<B, 4, 16, 3, 2, 0, 64, 256>("fa2 4w2b"),
    entry<B, 4, 16, 3, 2, kTick, 16, 128>("tick 4w2b s16"),
    entry<B, 4, 16, 3, 2, kTick | kFast, 16, 128>("tickfast 4w2b s16"),
    entry<B, 4, 16, 3, 2, 0, 16, 128>("fa2 4w2b s16"),
    entry<B, 4, 16, 3, 2, kTick | kFast, 64, 256>("tickfast 4w2b s64"),
    {}};
