// Schedules from tensors of lengths on the CPU, by one thread.
#pragma once

#include <flashinfer/attention/batch_schedule.h>

namespace flashinfer::cpu {

inline void schedule_batch(const BatchScheduleParams& params) {
  batch_schedule::Memory memory;
  batch_schedule::make(params, batch_schedule::OneThread{memory});
}

}  // namespace flashinfer::cpu
