#include <flashinfer/cuda/gemm/sm90/launch.cuh>
#include <cstdio>
#include <cstdlib>
#include <vector>
#include <algorithm>
#include <cmath>
using namespace flashinfer; using namespace flashinfer::cuda;
#ifdef FI_FORCE_SOME
#define SIZE GemmSize::kSome
#else
#define SIZE GemmSize::kMany
#endif
__global__ void fill(uint8_t* x, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t h = (uint32_t)i * 2654435761u + seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    uint8_t v = h & 0xff; if ((v & 0x7f) >= 0x48) v = (v & 0x80) | 0x30 | (v & 7);  // |x| < 4
    x[i] = v;
  }
}
__global__ void fillf(float* x, size_t n, uint32_t seed) {
  for (size_t i = blockIdx.x * (size_t)blockDim.x + threadIdx.x; i < n; i += (size_t)gridDim.x * blockDim.x) {
    uint32_t h = (uint32_t)i * 2654435761u + seed; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; h *= 3266489917u; h ^= h >> 16;
    x[i] = 0.25f + (h & 0xffff) / 65536.f;
  }
}
__device__ float dec(uint8_t v) { int e = (v >> 3) & 15, m = v & 7; float r = e ? ldexpf(1 + m / 8.f, e - 7) : ldexpf(m / 8.f, -6); return v & 0x80 ? -r : r; }
__global__ void check(const uint8_t* a, const uint8_t* b, const float* sa, const float* sb, int64_t sam, int64_t sak, const bfloat16_t* out, int m, int n, int k, float* worst) {
  const int id = blockIdx.x, lane = threadIdx.x;
  uint32_t h = id * 2654435761u + 7; h ^= h >> 15; h *= 2246822519u; h ^= h >> 13; const int r = h % m; h *= 3266489917u; h ^= h >> 16; const int c = h % n;
  double sum = 0, mag = 0;
  for (int i = lane; i < k; i += 32) { const double x = (double)dec(a[(size_t)r * k + i]) * dec(b[(size_t)c * k + i]) * sa[r * sam + (i / 128) * sak] * sb[(size_t)(c / 128) * (k / 128) + i / 128]; sum += x; mag += fabs(x); }
  for (int s = 16; s; s /= 2) { sum += __shfl_xor_sync(~0u, sum, s); mag += __shfl_xor_sync(~0u, mag, s); }
  if (lane == 0) worst[id] = fmax(0.0, fabs((double)to_float(out[(size_t)r * n + c]) - sum) - fabs(sum) / 256) / mag;
}
int main(int argc, char** argv) {
  const char* name = argv[1];
  const bool along = !(argc > 2 && argv[2][0] == 'm');
  const bool small = argc > 3;
  struct Sh { int m, n, k; };
  std::vector<Sh> shapes = small ? std::vector<Sh>{{264, 256, 1408}} : std::vector<Sh>{{4096, 7168, 16384}, {4096, 24576, 1536}, {4096, 7168, 2048}};
  for (auto [m, n, k] : shapes) {
    uint8_t *a, *b; float *sa, *sb, *w; bfloat16_t* out;
    cudaMalloc(&a, (size_t)m * k); cudaMalloc(&b, (size_t)n * k); cudaMalloc(&out, (size_t)m * n * 2);
    cudaMalloc(&sa, (size_t)m * k / 32); cudaMalloc(&sb, (size_t)n * k / 4096 + 4096); cudaMalloc(&w, 4096 * 4);
    fill<<<1024, 256>>>(a, (size_t)m * k, 1); fill<<<1024, 256>>>(b, (size_t)n * k, 77); fillf<<<256, 256>>>(sa, (size_t)m * k / 128, 5); fillf<<<256, 256>>>(sb, (size_t)n * k / 16384, 9);
    GemmParams p{};
    p.a = a; p.b = b; p.out = out; p.a_places = {INT64_MAX, 1, 0, 0, k}; p.out_places = {INT64_MAX, 1, 0, 0, n};
    p.b_matrix_stride = (int64_t)n * k; p.b_stride_n = k; p.b_stride_k = 1; p.m = m; p.n = n; p.k = k; p.a_num_rows = m; p.num_groups = 1; p.num_matrices = 1;
    const int64_t sam = along ? k / 128 : 1, sak = along ? 1 : m;
    p.a_scale = {sa, 0, sak, {INT64_MAX, 1, 0, 0, sam}, 1};
    p.b_scale = {sb, 0, 1, {INT64_MAX, 1, 0, 0, k / 128}, 128};
    p.scale_depth = 128; p.a_dtype = p.b_dtype = DType::kFloat8E4M3; p.out_dtype = DType::kBFloat16;
    cudaStream_t s; cudaStreamCreate(&s);
    Launch where{}; where.device = 0; where.stream = s;
    auto run = [&] {
      if (!sm90::launch_hopper_shape<sm90::GemmShape<fp8_e4m3_t, true, sm90::SIZE>>(p, where)) { puts("no kernel"); exit(1); }
    };
    run(); cudaDeviceSynchronize();
    if (cudaGetLastError() != cudaSuccess) { printf("%s error\n", name); return 1; }
    check<<<4096, 32, 0, s>>>(a, b, sa, sb, sam, sak, out, m, n, k, w);
    std::vector<float> hw(4096); cudaMemcpyAsync(hw.data(), w, 16384, cudaMemcpyDeviceToHost, s); cudaStreamSynchronize(s);
    const float worst = *std::max_element(hw.begin(), hw.end());
    if (small) { printf("%s small: err %.1e\n", name, worst); continue; }
    std::vector<float> t; cudaEvent_t e0, e1; cudaEventCreate(&e0); cudaEventCreate(&e1);
    const int burst = k > 10000 ? 8 : 24;
    for (int i = 0; i < 9; ++i) { cudaEventRecord(e0, s); for (int j = 0; j < burst; ++j) run(); cudaEventRecord(e1, s); cudaEventSynchronize(e1); float ms; cudaEventElapsedTime(&ms, e0, e1); t.push_back(ms / burst); }
    std::sort(t.begin(), t.end());
    const double f = 2.0 * m * n * k * 1e-9;
    printf("%-14s %s %dx%dx%d: median %.0f best %.0f TFLOP/s, err %.1e of magnitude %s\n", name, along ? "K" : "MN", m, n, k, f / t[4], f / t[0], worst, worst < 2.5e-4 ? "ok" : "WRONG"); fflush(stdout);
    cudaFree(a); cudaFree(b); cudaFree(out); cudaFree(sa); cudaFree(sb); cudaFree(w);
  }
}
