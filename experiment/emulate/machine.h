// A multiprocessor of fibers, one for each thread, to run Hopper kernels on a host: barriers, copies and products are
// done at once or as late as the program allows, at random. One OS thread is one block.
#pragma once
#include <cuda_bf16.h>
#include <cuda_fp16.h>
#include <ucontext.h>
#include <unistd.h>
#undef __launch_bounds__
#define __launch_bounds__(...)

#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <random>
#include <thread>
#include <vector>

namespace emu {

struct Dim { unsigned x = 1, y = 1, z = 1; };
struct Barrier { int count = 0, pending = 0; int64_t tx = 0; uint32_t phase = 0; };
struct Product { float* d; int n; bool accumulate, from_registers, bf16, trans_a, trans_b; uint64_t a, b; uint32_t r[4]; };
struct GroupState {
  std::deque<std::vector<Product>> open[128];  // by thread: committed groups not yet run
  std::vector<Product> issued[128];
  int committed[128] = {}, run = 0;
};
struct Fiber {
  ucontext_t context;
  std::unique_ptr<char[]> stack;
  std::function<bool()> until;
  bool done = false;
  std::vector<std::function<void()>> stores;  // bulk stores under way, by groups
  std::vector<std::function<void()>> uncommitted;
  std::vector<uint32_t> dirty;
};
struct Block {
  ucontext_t main;
  std::vector<Fiber> fibers;
  int current = 0;
  Dim thread_dim, block_idx;
  std::vector<uint8_t> memory;  // dynamic shared memory
  uint8_t* small = nullptr;
  std::map<uint32_t, Barrier> barriers;
  struct Meeting { int arrived = 0; uint64_t generation = 0; };
  Meeting warps[64], named[16];
  uint64_t slots[64][32];
  std::vector<GroupState> groups;
  std::vector<std::function<void()>> loads;
  std::map<uint32_t, int> dirty;  // 16-byte units that a thread wrote and no fence of it followed
  std::mt19937 random;
  std::function<void()> body;
};
inline thread_local Block* block = nullptr;
inline std::atomic<bool> failed{false};

inline Fiber& fiber() { return block->fibers[block->current]; }
inline void wait_until(std::function<bool()> condition, const char* what) {
  if (condition() && block->random() % 8) return;
  fiber().until = std::move(condition);
  (void)what;
  swapcontext(&fiber().context, &block->main);
}
inline void entry() {
  block->body();
  fiber().done = true;
  swapcontext(&fiber().context, &block->main);
}
inline void meet(Block::Meeting& m, int count) {
  const uint64_t generation = m.generation;
  if (++m.arrived == count) m.arrived = 0, ++m.generation;
  wait_until([&m, generation] { return m.generation != generation; }, "meeting");
}
inline int warp() { return block->current / 32; }
inline int lane() { return block->current % 32; }
inline void meet_warp() { meet(block->warps[warp()], 32); }

constexpr uint32_t kBase = 1024, kSmall = 0x100000;
inline uint32_t to_shared(const void* p) {
  const auto* at = static_cast<const uint8_t*>(p);
  if (at >= block->memory.data() && at < block->memory.data() + block->memory.size())
    return kBase + static_cast<uint32_t>(at - block->memory.data());
  if (!block->small) block->small = const_cast<uint8_t*>(at);
  return kSmall + static_cast<uint32_t>(at - block->small);
}
inline uint8_t* shared(uint32_t at) {
  if (at >= kSmall - 65536) return block->small + (static_cast<int64_t>(at) - kSmall);
  if (at < kBase || at - kBase >= block->memory.size()) { fprintf(stderr, "shared address %u\n", at); abort(); }
  return block->memory.data() + (at - kBase);
}
inline void wrote(uint32_t at, int bytes) {
  for (uint32_t u = at / 16; u <= (at + bytes - 1) / 16; ++u) block->dirty[u] = block->current + 1, fiber().dirty.push_back(u);
}
inline void fence() {
  for (uint32_t u : fiber().dirty) {
    auto found = block->dirty.find(u);
    if (found != block->dirty.end() && found->second == block->current + 1) block->dirty.erase(found);
  }
  fiber().dirty.clear();
}
inline void reads_by_proxy(uint32_t at, const char* who) {
  if (block->dirty.count(at / 16) && !failed.exchange(true)) fprintf(stderr, "%s reads %u, which was written without a fence\n", who, at);
}

inline void complete(Barrier& b) {
  if (b.pending == 0 && b.tx == 0) ++b.phase, b.pending = b.count;
}
inline Barrier& barrier(uint32_t at) {
  auto found = block->barriers.find(at);
  if (found == block->barriers.end()) { fprintf(stderr, "no barrier at %u\n", at); abort(); }
  return found->second;
}

inline float number(bool bf16, const uint8_t* from) {
  uint16_t bits; memcpy(&bits, from, 2);
  if (bf16) { uint32_t wide = static_cast<uint32_t>(bits) << 16; float f; memcpy(&f, &wide, 4); return f; }
  __half h; memcpy(&h, &bits, 2); return __half2float(h);
}
// Element (row, k) of an operand in shared memory.
inline float operand(uint64_t descriptor, bool bf16, bool transposed, int row, int k) {
  const uint32_t start = (descriptor & 0x3fff) << 4, leading = (descriptor >> 16 & 0x3fff) << 4, stride = (descriptor >> 32 & 0x3fff) << 4;
  if (descriptor >> 62 != 1) { fprintf(stderr, "swizzle\n"); abort(); }
  uint32_t at = transposed ? start + row / 64 * leading + k / 8 * stride + k % 8 * 128 + row % 64 * 2
                           : start + row / 8 * stride + row % 8 * 128 + k * 2;
  at ^= (at >> 7 & 7) << 4;
  reads_by_proxy(at, "wgmma");
  return number(bf16, shared(at));
}
inline void multiply(const Product* p[128]) {
  const Product& one = *p[0];
  static thread_local float a[64][16], b[256][16];
  for (int k = 0; k < 16; ++k) {
    for (int n = 0; n < one.n; ++n) b[n][k] = operand(one.b, one.bf16, one.trans_b, n, k);
    if (!one.from_registers)
      for (int m = 0; m < 64; ++m) a[m][k] = operand(one.a, one.bf16, one.trans_a, m, k);
  }
  if (one.from_registers)
    for (int t = 0; t < 128; ++t)
      for (int i = 0; i < 4; ++i)
        for (int e = 0; e < 2; ++e)
          a[t / 32 * 16 + t % 32 / 4 + 8 * (i % 2)][t % 4 * 2 + e + 8 * (i / 2)] =
              number(one.bf16, reinterpret_cast<const uint8_t*>(&p[t]->r[i]) + 2 * e);
  for (int t = 0; t < 128; ++t)
    for (int i = 0; i < one.n / 2; ++i) {
      const int m = t / 32 * 16 + t % 32 / 4 + 8 * (i / 2 % 2), n = 8 * (i / 4) + 2 * (t % 4) + i % 2;
      float sum = one.accumulate ? p[t]->d[i] : 0;
      for (int k = 0; k < 16; ++k) sum += a[m][k] * b[n][k];
      p[t]->d[i] = sum;
    }
}
inline GroupState& group() { return block->groups[block->current / 128]; }
inline bool run_group(GroupState& g, int upto) {
  while (g.run < upto) {
    for (auto& open : g.open) if (open.empty()) return false;
    const size_t count = g.open[0].front().size();
    for (size_t i = 0; i < count; ++i) {
      const Product* p[128];
      for (int t = 0; t < 128; ++t) {
        if (g.open[t].front().size() != count) { fprintf(stderr, "groups differ\n"); abort(); }
        p[t] = &g.open[t].front()[i];
      }
      multiply(p);
    }
    for (auto& open : g.open) open.pop_front();
    ++g.run;
  }
  return true;
}
inline void issue(const Product& p) { group().issued[block->current % 128].push_back(p); }
inline void commit() {
  GroupState& g = group();
  const int t = block->current % 128;
  g.open[t].push_back(std::move(g.issued[t]));
  g.issued[t].clear();
  ++g.committed[t];
  bool all = true;
  for (int c : g.committed) all = all && c >= g.committed[t];
  if (all && block->random() % 2) run_group(g, g.committed[t]);  // at once
}
inline void wait_products(int pending) {
  GroupState& g = group();
  const int upto = g.committed[block->current % 128] - pending;
  wait_until([&g, upto] { return run_group(g, upto); }, "products");
}

template <typename K, typename... A>
void run(Dim grid, Dim threads, size_t bytes, int seed, K kernel, A... args) {
  const unsigned blocks = grid.x * grid.y;
  std::vector<std::thread> running;
  for (unsigned n = 0; n < blocks; ++n) {
    running.emplace_back([&, n] {
      static thread_local Block mine;
      mine.~Block();
      new (&mine) Block();
      block = &mine;
      mine.random.seed(seed * 1000 + n);
      mine.thread_dim = threads, mine.block_idx = {n % grid.x, n / grid.x, 0};
      mine.memory.assign(bytes, 0xff);  // NaN
      mine.fibers.resize(threads.x);
      mine.groups.resize(threads.x / 128 + 1);
      mine.body = [&] { kernel(args...); };
      for (Fiber& f : mine.fibers) {
        getcontext(&f.context);
        f.stack.reset(new char[65536]);
        f.context.uc_stack.ss_sp = f.stack.get(), f.context.uc_stack.ss_size = 65536, f.context.uc_link = &mine.main;
        makecontext(&f.context, entry, 0);
      }
      int64_t idle = 0;
      unsigned frozen = ~0u, rounds = 0;  // a warpgroup that stands still for a while
      for (size_t left = threads.x; left > 0;) {
        bool moved = false;
        if (rounds == 0) frozen = mine.random() % 2 ? ~0u : mine.random() % (threads.x / 128 + 1), rounds = 1 + mine.random() % 400;
        --rounds;
        const unsigned start = mine.random() % threads.x, backwards = mine.random() % 2;
        for (unsigned i = 0; i < threads.x; ++i) {
          const unsigned at = (start + (backwards ? threads.x - i : i)) % threads.x;
          if (at / 128 == frozen) continue;
          Fiber& f = mine.fibers[at];
          mine.current = static_cast<int>(at);
          if (f.done || (f.until && !f.until())) continue;
          f.until = nullptr, moved = true;
          swapcontext(&mine.main, &f.context);
          if (f.done) --left;
        }
        if (!mine.loads.empty() && (!moved || mine.random() % 16 == 0)) {
          std::swap(mine.loads[mine.random() % mine.loads.size()], mine.loads.back());
          auto load = std::move(mine.loads.back());
          mine.loads.pop_back();
          load(), moved = true;
        }
        if (!moved) {
          rounds = 0;
          std::this_thread::yield();
          if (++idle == 20000000) { fprintf(stderr, "block %u hangs, %zu threads left\n", n, left); failed = true; _exit(3); }
        } else {
          idle = 0;
        }
      }
      for (Fiber& f : mine.fibers) for (auto& s : f.stores) s();
    });
    if (running.size() >= 64) { for (auto& t : running) t.join(); running.clear(); }
  }
  for (auto& t : running) t.join();
}

struct Index { unsigned y = 0; struct X { operator unsigned() const { return static_cast<unsigned>(block->current); } }; X x; };
struct BlockIndex {
  struct X { operator unsigned() const { return block->block_idx.x; } };
  struct Y { operator unsigned() const { return block->block_idx.y; } };
  X x; Y y;
};
}  // namespace emu
static emu::Index threadIdx;
static emu::BlockIndex blockIdx;
struct EmuBlockDim { struct X { operator unsigned() const { return emu::block->thread_dim.x; } } x; };
static EmuBlockDim blockDim;
inline uint32_t __byte_perm(uint32_t, uint32_t, uint32_t) { abort(); }
inline uint32_t __vcmpeq2(uint32_t, uint32_t) { abort(); }
inline uint32_t __cvta_generic_to_shared(const void* p) { return emu::to_shared(p); }
inline void __syncthreads() { emu::meet(emu::block->named[0], static_cast<int>(emu::block->fibers.size())); }
inline void __syncwarp() { emu::meet_warp(); }
template <typename T> T __shfl_xor_sync(unsigned, T v, int by) {
  memcpy(&emu::block->slots[emu::warp()][emu::lane()], &v, sizeof v);
  emu::meet_warp();
  memcpy(&v, &emu::block->slots[emu::warp()][emu::lane() ^ by], sizeof v);
  emu::meet_warp();
  return v;
}
template <typename T> T __shfl_sync(unsigned, T v, int from) {
  memcpy(&emu::block->slots[emu::warp()][emu::lane()], &v, sizeof v);
  emu::meet_warp();
  memcpy(&v, &emu::block->slots[emu::warp()][from], sizeof v);
  emu::meet_warp();
  return v;
}
inline uint32_t atomicAdd(uint32_t* at, uint32_t by) { return __atomic_fetch_add(at, by, __ATOMIC_SEQ_CST); }
inline float __uint_as_float(uint32_t x) { float f; memcpy(&f, &x, 4); return f; }
inline uint32_t __float_as_uint(float x) { uint32_t f; memcpy(&f, &x, 4); return f; }
template <typename T> T min(T a, T b) { return a < b ? a : b; }
template <typename T> T max(T a, T b) { return a > b ? a : b; }
