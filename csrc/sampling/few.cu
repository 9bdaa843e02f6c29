// Draws by filters that keep few elements of long rows.
#include <flashinfer/cuda/sampling/few.cuh>
#include <flashinfer/cuda/sampling/launch.cuh>

namespace flashinfer::cuda {

bool launch_few_samples(const SampleParams& p, const Launch& where) {
  // Where rows are as many as SMs, a row is not parted.
  const int64_t chunks = num_chunks(p.vocab_size);
  if (p.num_outputs < device_info(where.device).num_sms || chunks < 4 * kHeldWarps || chunks > kHeldChunks)
    return false;
  const bool few = p.has_top_k && !p.top_k.data && p.top_k.integer <= kMostFew;
  if (p.indices.data || (p.has_top_k && !few)) return false;
  const Shape shape{1, kHeldThreads, FewRow::bytes(), false};
  if (p.is_logits) {
    if (!few || !p.top_k_first || p.has_min_p) return false;
    launch_clusters<few_kernel<true>>(shape, p.num_outputs, where, p);
  } else {
    if (!few && p.has_top_p) return false;
    launch_clusters<few_kernel<false>>(shape, p.num_outputs, where, p);
  }
  return true;
}

}  // namespace flashinfer::cuda
