#include <cmath>
#include <cstdio>
#include <cstring>
#include <algorithm>
#include <numeric>
#include <random>
#include <string>
#include <vector>
#include "lab.cuh"
using namespace flashinfer;
extern const LabEntry list_a[], list_b[], list_c[], list_d[], list_e[];
#define CK(x) do { cudaError_t e_ = (x); if (e_ != cudaSuccess) { printf("CUDA %s at %d: %s\n", #x, __LINE__, cudaGetErrorString(e_)); exit(1); } } while (0)
__global__ void fill(uint32_t* p, size_t n, bool fp8) {
  for (size_t i = blockIdx.x * size_t(blockDim.x) + threadIdx.x; i < n; i += size_t(gridDim.x) * blockDim.x) {
    uint64_t z = (i + 1) * 0x9E3779B97F4A7C15ull; z ^= z >> 31; z *= 0xBF58476D1CE4E5B9ull; z ^= z >> 29;
    if (fp8) { p[i] = uint32_t(z) & 0xB7B7B7B7u; continue; }
    const float a = (float(uint32_t(z) & 0xffff) / 32768 - 1) * 1.7f, b = (float(uint32_t(z >> 32) & 0xffff) / 32768 - 1) * 1.7f;
    p[i] = (__float_as_uint(a) >> 16) | (__float_as_uint(b) & 0xffff0000u);
  }
}
struct Shape { const char* name; std::vector<int> lens; int hq, hkv, page; };
static std::vector<int> skewed(int requests, int total, int longest) {
  double sum = 0; std::vector<int> out{longest};
  for (int r = 1; r < requests; ++r) sum += 1.0 / (r + 1);
  for (int r = 1; r < requests; ++r) out.push_back(std::max(1, int(1.0 / (r + 1) / sum * (total - longest))));
  return out;
}
struct Run { const LabEntry* e; cudaGraphExec_t exec; std::vector<float> us; float err; size_t items, merges; std::vector<uint32_t> times; unsigned blocks; std::vector<void*> owned; };
int main(int argc, char** argv) {
  const char* only = argc > 1 ? argv[1] : "";
  const bool ncu = argc > 2;
  CK(cudaSetDevice(0));
  cudaStream_t stream; CK(cudaStreamCreate(&stream));
  const size_t kBytes = 2400ull << 20;
  uint8_t *cache[2], *q; CK(cudaMalloc(&cache[0], kBytes)); CK(cudaMalloc(&cache[1], kBytes / 2)); CK(cudaMalloc(&q, 256 * 64 * 128 * 2));
  fill<<<2048, 256>>>((uint32_t*)cache[0], kBytes / 4, false); fill<<<2048, 256>>>((uint32_t*)cache[1], kBytes / 8, true); fill<<<256, 256>>>((uint32_t*)q, 256 * 64 * 64, false);
  CK(cudaDeviceSynchronize());
  std::vector<Shape> shapes = {{"B1 L32768", {32768}, 32, 8, 16}, {"B16 L4096", std::vector<int>(16, 4096), 32, 8, 16}, {"B64 L4096", std::vector<int>(64, 4096), 32, 8, 16},
    {"B1 L4096", {4096}, 32, 8, 16}, {"Pareto", skewed(64, 230000, 65000), 32, 8, 16}, {"B256 L1024", std::vector<int>(256, 1024), 32, 8, 16},
    {"B4 L256", std::vector<int>(4, 256), 32, 8, 16}, {"B64 L100", std::vector<int>(64, 100), 32, 8, 16}, {"B64 page1", std::vector<int>(64, 4096), 32, 8, 1}, {"B8 L8192", std::vector<int>(8, 8192), 32, 8, 16}, {"B64 64/8", std::vector<int>(64, 4096), 64, 8, 16}};
  const int device = 0;
  for (const Shape& sh : shapes) for (int fp8 = 0; fp8 < 2; ++fp8) {
    if (*only && !strstr(sh.name, only)) continue;
    const int B = sh.lens.size(), es = fp8 ? 1 : 2, D = 128;
    std::vector<int> indptr{0}, last;
    for (int l : sh.lens) indptr.push_back(indptr.back() + (l + sh.page - 1) / sh.page);
    std::vector<int> idx(indptr.back()); std::iota(idx.begin(), idx.end(), 0); std::shuffle(idx.begin(), idx.end(), std::mt19937(1));
    const size_t page_elems = size_t(2) * sh.page * sh.hkv * D, set_bytes = page_elems * idx.size() * es;
    const int sets = std::max<int>(2, std::min<int>(12, 240e6 / set_bytes + 1));
    if (set_bytes * sets > kBytes >> fp8) { printf("%s: too large\n", sh.name); continue; }
    int *d_indptr, *d_idx; CK(cudaMalloc(&d_indptr, 4 * (B + 64))); CK(cudaMalloc(&d_idx, 4 * idx.size()));
    CK(cudaMemcpy(d_indptr, indptr.data(), 4 * (B + 1), cudaMemcpyHostToDevice)); CK(cudaMemcpy(d_idx, idx.data(), 4 * idx.size(), cudaMemcpyHostToDevice));
    double bytes = 0; for (int l : sh.lens) bytes += 2.0 * l * sh.hkv * D * es;
    std::vector<Run> runs; std::vector<uint16_t> want;
    for (const LabEntry* list : {list_a, list_b, list_c, list_d, list_e}) for (const LabEntry* e = list; e->name; ++e) {
      if (e->fp8 != fp8) continue;
      const WorkLimits lim = e->limits(device);
      if (lim.places == 0) { printf("%s does not fit\n", e->name); continue; }
      PlanRequest r{}; r.batch_size = B; r.kv_lens = sh.lens.data(); r.num_kv_heads = sh.hkv; r.group = sh.hq / sh.hkv; r.mask_mode = MaskMode::kNone; r.window_left = -1;
      r.tile_rows = lim.tile_rows; r.places = lim.places; r.min_chunk = lim.min_chunk; r.kv_step = lim.kv_step; r.split = true;
      const Plan plan = flashinfer::plan(r);
      const size_t items = plan.items.size(), merges = std::max<size_t>(1, plan.merges.size());
      Params p{};
      std::vector<int> counts(16); counts[0] = items; counts[1] = plan.merges.size();
      auto up = [&](const void* data, size_t n) { void* d; CK(cudaMalloc(&d, n + 256)); CK(cudaMemset(d, 0, n + 256)); if (data) CK(cudaMemcpy(d, data, n, cudaMemcpyHostToDevice)); return d; };
      Run run{e}; run.items = items; run.merges = plan.merges.size();
      auto keep = [&](void* d) { run.owned.push_back(d); return d; };
      std::vector<int> ones(B, 1);
      p.counts = (int*)keep(up(counts.data(), 64)); p.items = (WorkItem*)keep(up(plan.items.data(), 32 * items)); p.merges = (MergeItem*)keep(up(plan.merges.data(), 32 * plan.merges.size()));
      p.qo_lens = (int*)keep(up(ones.data(), 4 * B)); p.kv_lens = (int*)keep(up(sh.lens.data(), 4 * B)); p.max_items = items; p.max_merges = merges;
      p.tickets = (uint32_t*)keep(up(nullptr, 4 * merges * sh.hkv));
      p.tile_rows = lim.tile_rows; p.slot_rows = plan.slot_rows;
      p.partial_o = (float*)keep(up(nullptr, 4 * size_t(plan.num_slots + 1) * sh.hkv * std::max(1, plan.slot_rows) * D)); p.partial_lse = (float*)keep(up(nullptr, 4 * size_t(plan.num_slots + 1) * sh.hkv * std::max(1, plan.slot_rows)));
      void* o = keep(up(nullptr, 2 * B * sh.hq * D));
      p.times = (uint32_t*)keep(up(nullptr, 32 * items * sh.hkv));
      p.q = q; p.q_row = sh.hq * D; p.q_head = D; p.o = o; p.o_row = sh.hq * D; p.o_head = D; p.lse = nullptr;
      p.kv.k_page = p.kv.v_page = page_elems; p.kv.k_row = p.kv.v_row = sh.hkv * D; p.kv.k_head = p.kv.v_head = D;
      p.kv.indices = d_idx; p.kv.indptr = d_indptr; p.kv.page_size = FastDiv(sh.page); p.kv.num_pages = idx.size();
      p.num_tokens = B; p.num_qo_heads = sh.hq; p.num_kv_heads = sh.hkv; p.group = FastDiv(sh.hq / sh.hkv); p.mask_mode = MaskMode::kNone; p.window_left = -1;
      p.o_scale = 1; p.sm_scale = 0.08838834764f;
      run.blocks = items * sh.hkv;
      auto one = [&](int i) { Params x = p; const uint8_t* base = cache[fp8] + (i % sets) * set_bytes; x.kv.k = base; x.kv.v = base + size_t(sh.page) * sh.hkv * D * es; e->run(x, Launch{stream, 0, 1}); };
      try { one(0); } catch (const std::exception& x) { printf("%s: %s\n", e->name, x.what()); continue; }
      CK(cudaStreamSynchronize(stream));
      std::vector<uint16_t> out(B * sh.hq * D); CK(cudaMemcpy(out.data(), o, 2 * out.size(), cudaMemcpyDeviceToHost));
      if (want.empty()) want = out;
      auto f = [](uint16_t x) { uint32_t u = uint32_t(x) << 16; float y; memcpy(&y, &u, 4); return y; };
      float top = 0, err = 0; for (size_t i = 0; i < out.size(); ++i) { const float d = fabsf(f(out[i]) - f(want[i])); err = d == d ? std::max(err, d) : 1e9f; top = std::max(top, fabsf(f(want[i]))); }
      run.err = err / top;
      if (ncu) { runs.push_back(run); continue; }
      cudaGraph_t graph; CK(cudaStreamBeginCapture(stream, cudaStreamCaptureModeThreadLocal)); for (int i = 0; i < 12; ++i) one(i); CK(cudaStreamEndCapture(stream, &graph));
      CK(cudaGraphInstantiate(&run.exec, graph, 0)); CK(cudaGraphDestroy(graph));
      runs.push_back(run);
    }
    if (ncu) continue;
    cudaEvent_t a, b; CK(cudaEventCreate(&a)); CK(cudaEventCreate(&b));
    for (int round = 0; round < 4; ++round) for (Run& run : runs) for (int i = 0; i < 6; ++i) {
      CK(cudaEventRecord(a, stream)); CK(cudaGraphLaunch(run.exec, stream)); CK(cudaEventRecord(b, stream)); CK(cudaEventSynchronize(b));
      float ms; CK(cudaEventElapsedTime(&ms, a, b)); if (i) run.us.push_back(ms * 1e3f / 12);
    }
    for (Run& run : runs) {
      std::sort(run.us.begin(), run.us.end()); const float us = run.us[run.us.size() / 2];
      printf("%-11s %-28s %7.1f us %5.2f TB/s  x%.3f  min %.1f  items %zu merges %zu  err %.1e\n", sh.name, run.e->name, us, bytes / us * 1e-6, runs[0].us.empty() ? 0 : runs[0].us[runs[0].us.size() / 2] / us, run.us[0], run.items, run.merges, run.err);
      if (strncmp(run.e->name, "times", 5) == 0 && run.blocks < 2200) {
        std::vector<uint32_t> t(run.blocks * 8); CK(cudaMemcpy(t.data(), run.owned[9], t.size() * 4, cudaMemcpyDeviceToHost));
        uint32_t t0 = t[1]; for (unsigned i = 0; i < run.blocks; ++i) if (int32_t(t[i * 8 + 1] - t0) < 0) t0 = t[i * 8 + 1];
        const char* names[] = {"resident", "waited", "item", "first data", "loop end", "written", "end"};
        for (int w = 0; w < 7; ++w) { std::vector<int> v; for (unsigned i = 0; i < run.blocks; ++i) v.push_back(int32_t(t[i * 8 + w] - t0)); std::sort(v.begin(), v.end());
          printf("    %-10s min %6d  5%% %6d  median %6d  95%% %6d  max %6d ns\n", names[w], v[0], v[v.size() / 20], v[v.size() / 2], v[v.size() * 19 / 20], v.back()); }
        std::vector<int> per(256); for (unsigned i = 0; i < run.blocks; ++i) per[t[i * 8 + 7] & 255]++; int c[8] = {}; for (int x : per) c[std::min(x, 7)]++; printf("    SMs with 1..7 blocks: %d %d %d %d %d %d %d\n", c[1], c[2], c[3], c[4], c[5], c[6], c[7]);
      }
      CK(cudaGraphExecDestroy(run.exec)); for (void* d : run.owned) cudaFree(d);
    }
    cudaFree(d_indptr); cudaFree(d_idx); fflush(stdout);
  }
}
