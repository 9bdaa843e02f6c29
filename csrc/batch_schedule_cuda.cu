// Schedules from tensors of lengths on CUDA.
#include <flashinfer/cuda/attention/batch_schedule.cuh>

namespace flashinfer {

void schedule_batch(const BatchScheduleParams& params, const Launch& where) { cuda::schedule_batch(params, where); }

}  // namespace flashinfer
