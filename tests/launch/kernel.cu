// Rules of the launcher on simulated devices: shared memory, threads, device numbers, grids.
#include <flashinfer/common/fused_moe.h>
#include <flashinfer/cuda/attention/backward/sm90/launch.cuh>
#include <flashinfer/cuda/gated_norm_backward.cuh>
#include <flashinfer/cuda/host/kernel.cuh>
#include <flashinfer/cuda/moe/activate.cuh>

#include <chrono>
#include <cstdio>
#include <stdexcept>
#include <string>
#include <thread>

#include "driver.h"

using namespace flashinfer;
using cuda::Kernel;

template <int kStatic>
__global__ void touch(int* out) {
  volatile __shared__ char own[kStatic + 4];
  extern __shared__ char memory[];
  own[threadIdx.x] = memory[threadIdx.x];
  *out = own[0];
}

static bool for_90a = false;  // true if this program was compiled for 9.0a
static int failures = 0;
static void expect(bool holds, const char* what, int64_t a = 0, int64_t b = 0) {
  if (holds) return;
  std::printf("%s: %lld, %lld\n", what, static_cast<long long>(a), static_cast<long long>(b));
  ++failures;
}

template <typename F>
static std::string error_of(const F& call) {
  try {
    call();
  } catch (const std::exception& error) {
    return error.what();
  }
  return "";
}

static Launch on(int device) {
  driver::current = device;
  return {nullptr, device, 0};
}

static int fresh = 0;  // next device without a launch

// Try every number of bytes around the limit: first, after more bytes, and after fewer.
template <int kStatic>
void test_limit() {
  using Touch = Kernel<touch<kStatic>>;
  static int out;
  for (int64_t bytes = (48 << 10) - kStatic - 600; bytes <= (48 << 10) + 600; bytes += 8) {
    for (const int64_t before : {int64_t{-1}, int64_t{64}, int64_t{40000}, int64_t{49152}, int64_t{100000}}) {
      const Launch where = on(fresh++);
      const auto run = [&](int64_t dynamic) { Touch::launch(1, 32, dynamic, where, &out); };
      const std::string said = error_of([&] {
        if (before >= 0) run(before);
        run(bytes);
        if (before >= 0) run(before);
      });
      expect(said.empty(), said.c_str(), kStatic, bytes);
    }
  }
  const std::string said = error_of([&] { Touch::launch(1, 32, 232448, on(fresh++), &out); });
  expect(said.find("got 232448 bytes of dynamic shared memory, wanted at most") != std::string::npos, said.c_str());
}

// A thread that requests less, and sets it later, must not lower the limit of another thread.
static void test_threads() {
  static int out;
  for (int round = 0; round < 20; ++round) {
    const int device = fresh++;
    driver::before_set = [](int bytes) {
      if (bytes < 55000) std::this_thread::sleep_for(std::chrono::milliseconds(5));
    };
    const auto ask = [device](int64_t bytes) {
      on(device);
      Kernel<touch<8>>::prepare(device, bytes);
    };
    std::thread less(ask, 50000), more(ask, 60000);
    less.join(), more.join();
    driver::before_set = nullptr;
    const std::string said = error_of([&] { Kernel<touch<8>>::launch(1, 32, 60000, on(device), &out); });
    expect(said.empty(), said.c_str(), round);
  }
}

// Devices are independent, also with large numbers.
static void test_devices() {
  static int out;
  for (const int device : {64, 128, 3000, 0, 63, 2936}) {
    const std::string said = error_of([&] { Kernel<touch<16>>::launch(1, 32, 60000, on(device), &out); });
    expect(said.empty(), said.c_str(), device);
  }
  const std::string said = error_of([&] { Kernel<touch<16>>::prepare(-1, 60000); });
  expect(said == "device: got -1, wanted 0 or more", said.c_str());
  // The attribute goes to the named device while another device is current.
  driver::current = 5;
  Kernel<touch<24>>::prepare(7, 60000);
  expect(driver::current == 5, "the current device changed", driver::current);
  const std::string other = error_of([&] { Kernel<touch<24>>::launch(1, 32, 60000, on(7), &out); });
  expect(other.empty(), other.c_str());
}

static void test_grids() {
  static int out;
  const Launch where = on(fresh++);
  const int before = driver::launches;
  Kernel<touch<0>>::launch(dim3(1, 0), 32, 0, where, &out);
  expect(driver::launches == before, "an empty grid launched");
  const std::string said = error_of([&] { Kernel<touch<0>>::launch(dim3(1, 65536), 32, 0, where, &out); });
  expect(said.find("got a grid of 1 x 65536 x 1, wanted at most") != std::string::npos, said.c_str());

  // More groups than a grid is high: one launch covers all.
  for (const int64_t groups : {1, 65535, 65536, 200000}) {
    GatedRmsNormBackwardParams p{};
    p.num_rows = 1, p.num_parts = 1, p.num_groups = groups, p.group_size = 8;
    int64_t launched = 0;
    driver::on_launch = [&](const driver::Taken& one) {
      if (one.kernel.find("gated_rms_norm_backward_kernel") != std::string::npos) launched += one.grid.y;
    };
    const std::string error = error_of([&] { cuda::gated_rms_norm_backward_of<half_t, Silu>(p, where); });
    driver::on_launch = nullptr;
    expect(error.empty() && launched == groups, error.c_str(), groups, launched);
  }
  // Rows longer than a grid is high.
  for (const int64_t size : {int64_t{128}, int64_t{1} << 26, int64_t{1} << 28}) {
    ActivateParams p{};
    static float scales[1];
    p.rows = 3, p.size = size, p.block_scales = scales;
    const std::string error = error_of([&] { cuda::activate_rows<half_t>(p, where); });
    expect(error.empty(), error.c_str(), size);
  }
}

// Code of 9.0a serves compute capability 9.0 only.
static void test_serves() {
  for (const int minor : {0, 1}) {
    for (const int major : {8, 9, 10, 12}) {
      driver::model.major = major, driver::model.minor = minor;
      const int device = fresh++;
      on(device);
      expect(cuda::serves_sm90a(device) == (major == 9 && minor == 0 && for_90a), "serves_sm90a", major, minor);
    }
  }
  driver::model.major = 9, driver::model.minor = 0;
}

// Gradients of expanded keys and values, with strides of 0, use the Hopper kernel.
static void test_expanded_gradients() {
  using S = cuda::sm90::BackwardShape<half_t, 64>;
  const int device = fresh++;
  for (const int64_t row : {int64_t{0}, int64_t{512}}) {
    for (const int64_t head : {int64_t{0}, int64_t{64}, int64_t{-64}}) {
      PrefillBackwardParams p{};
      p.batch_size = 1, p.tokens = p.kv_tokens = 128, p.num_qo_heads = p.num_kv_heads = 8;
      p.head_dim_qk = p.head_dim_vo = 64, p.window_left = -1;
      p.q.row = p.grad.row = 512, p.q.head = p.grad.head = 64;
      p.k.row = p.v.row = row, p.k.head = p.v.head = head;
      const bool serves = cuda::sm90::serves_shape<S>(p, on(device));
      expect(serves == (head >= 0 && for_90a), "serves_shape", row, head);
    }
  }
}

int main(int count, char** words) {
  for_90a = count > 1 && std::string(words[1]) == "90a";
  driver::read_statics();
  test_devices();
  fresh = 4000;
  test_limit<0>(), test_limit<444>(), test_limit<508>(), test_limit<4092>();
  test_threads();
  test_grids();
  test_serves();
  test_expanded_gradients();
  std::printf("%d failures\n", failures);
  return failures != 0;
}
