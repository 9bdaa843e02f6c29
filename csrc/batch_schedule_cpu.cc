// Schedules from tensors of lengths on the CPU.
#include <flashinfer/common/launch.h>
#include <flashinfer/cpu/attention/batch_schedule.h>

namespace flashinfer {

void schedule_batch(const BatchScheduleParams& params, const Launch&) { cpu::schedule_batch(params); }

}  // namespace flashinfer
