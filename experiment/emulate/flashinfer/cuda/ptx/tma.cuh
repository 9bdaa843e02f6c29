#pragma once
#include "machine.h"
struct CUtensorMap { const uint8_t* data; uint64_t sizes[3]; int64_t strides[3]; uint32_t box[3]; };
namespace flashinfer::cuda::ptx {
inline void tma_prefetch(const CUtensorMap*) {}
inline void done(uint32_t barrier, int64_t bytes) { auto& b = emu::barrier(barrier); b.tx -= bytes; emu::complete(b); }
inline void tma_load(uint32_t to, const CUtensorMap* m, uint32_t barrier, int x, int y, int z) {
  if (to % 1024) { fprintf(stderr, "box at %u\n", to); abort(); }
  const CUtensorMap map = *m;
  emu::block->loads.push_back([=] {
    for (uint32_t j = 0; j < map.box[1]; ++j)
      for (uint32_t i = 0; i < map.box[0]; ++i) {
        uint16_t v = 0;
        if (x + i < map.sizes[0] && int64_t(y) + j < int64_t(map.sizes[1]) && z < int64_t(map.sizes[2]))
          memcpy(&v, map.data + 2 * ((x + i) * map.strides[0] + (int64_t(y) + j) * map.strides[1] + z * map.strides[2]), 2);
        uint32_t at = to + j * 128 + i * 2;
        at ^= (at >> 7 & 7) << 4;
        memcpy(emu::shared(at), &v, 2);
        emu::block->dirty.erase(at / 16);
      }
    done(barrier, int64_t(map.box[0]) * map.box[1] * map.box[2] * 2);
  });
}
inline void bulk_load(uint32_t to, const void* from, uint32_t bytes, uint32_t barrier) {
  if (to % 16 || reinterpret_cast<uintptr_t>(from) % 16 || bytes % 16) { fprintf(stderr, "bulk_load\n"); abort(); }
  emu::block->loads.push_back([=] { memcpy(emu::shared(to), from, bytes); done(barrier, bytes); });
}
inline void later(std::function<void()> f) { emu::fiber().uncommitted.push_back(std::move(f)); }
inline void bulk_store(void* to, uint32_t from, uint32_t bytes) {
  later([=] { for (uint32_t i = 0; i < bytes; i += 16) emu::reads_by_proxy(from + i, "store"); memcpy(to, emu::shared(from), bytes); });
}
inline void bulk_add(float* to, uint32_t from, uint32_t bytes) {
  later([=] {
    for (uint32_t i = 0; i < bytes; i += 16) emu::reads_by_proxy(from + i, "add");
    for (uint32_t i = 0; i < bytes / 4; ++i) { float f; memcpy(&f, emu::shared(from + 4 * i), 4); to[i] += f; }
  });
}
inline void bulk_commit() {
  auto& f = emu::fiber();
  for (auto& s : f.uncommitted) { if (emu::block->random() % 2) s(); else f.stores.push_back(std::move(s)); }
  f.uncommitted.clear();
}
template <int kPending> inline void bulk_wait_read() { for (auto& s : emu::fiber().stores) s(); emu::fiber().stores.clear(); }
template <int kPending> inline void bulk_wait() { bulk_wait_read<0>(); }
}
