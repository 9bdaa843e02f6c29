#include "lab.cuh"
using namespace flashinfer;
using namespace flashinfer::cuda;
using E = fp8_e4m3_t;
extern const LabEntry list_d[] = {
    entry<E, 4, 32, 3, 2, 0, 128, 256>("fp8 fa2 4w2b k32"),
    entry<E, 4, 32, 3, 2, kTick | kFast, 32, 256>("fp8 tickfast 4w2b k32"),
    entry<E, 4, 16, 4, 3, kTick | kFast, 16, 128>("fp8 tickfast 4w3b k16"),
    entry<E, 4, 16, 4, 2, kTick | kFast, 16, 128>("fp8 tickfast 4w2b k16"),
    entry<E, 4, 32, 3, 3, kTick | kFast, 32, 256>("fp8 tickfast 4w3b k32"),
    entry<E, 8, 32, 3, 1, kTick | kFast, 32, 256>("fp8 tickfast 8w1b k32"),
    entry<E, 4, 32, 4, 2, kTick | kFast, 32, 256>("fp8 tickfast 4w2b k32 s4"),
    {}};
