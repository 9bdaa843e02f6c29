#include "lab.cuh"
using namespace flashinfer;
using namespace flashinfer::cuda;
using B = bfloat16_t;
extern const LabEntry list_c[] = {
    entry<B, 4, 16, 3, 2, kTick | kFast | kEvict, 16, 128>("tickfast+evict 4w2b"),
    entry<B, 4, 16, 3, 2, kTick | kFast | kUnsafe, 16, 128>("tickfast+unsafe 4w2b"),
    entry<B, 8, 16, 3, 1, kTick | kFast | kUnsafe, 16, 256>("tickfast+unsafe 8w1b"),
    entry<B, 4, 16, 3, 2, kNoMerge, 16, 128>("no merge (wrong) 4w2b"),
    entry<B, 4, 16, 2, 3, kTick | kFast | kEvict | kGuess, 16, 128>("tickfast+evict,guess 4w3b"),
    {}};
