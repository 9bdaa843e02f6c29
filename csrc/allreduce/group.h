// The group of a call, from the table of its workspace.
#pragma once

#include "binding/binding.h"

#include <flashinfer/common/allreduce.h>

namespace flashinfer::binding {

// Positions in a workspace's table. flashinfer/comm/workspace.py writes it.
enum TableEntry : int64_t { kState, kReport, kRank, kRanks, kMultiprocessors, kSlotBytes, kTimeout, kInboxes };

inline void check_alive(const Check& check, const CommGroup& group) {
  if (__atomic_load_n(&group.report->error, __ATOMIC_ACQUIRE) != 0 ||
      __atomic_load_n(&group.report->abort, __ATOMIC_RELAXED) != 0)
    check.fail("workspace", "has failed, see its check(); wanted a new one", "GroupError");
}

inline CommGroup group_of(const Check& check, const View& table) {
  if (table.device_type != aoti_torch_device_type_cpu()) check.fail(table, "got a tensor of a device");
  check.dtype(table, {DType::kInt64});
  check.shape(table, {kInboxes + kMaxRanks});
  check.contiguous(table);
  const auto* at = static_cast<const int64_t*>(table.data);
  if (at[kState] == 0) check.fail("workspace", "got one after destroy(), wanted a new one");
  CommGroup group{.state = reinterpret_cast<CommState*>(at[kState]),
                  .report = reinterpret_cast<CommReport*>(at[kReport]),
                  .rank = static_cast<int>(at[kRank]),
                  .ranks = static_cast<int>(at[kRanks]),
                  .num_sms = static_cast<int>(at[kMultiprocessors]),
                  .slot_bytes = at[kSlotBytes],
                  .timeout_ns = static_cast<uint64_t>(at[kTimeout]),
                  .inbox = {}};
  for (int rank = 0; rank < kMaxRanks; ++rank) group.inbox[rank] = reinterpret_cast<uint8_t*>(at[kInboxes + rank]);
  check_alive(check, group);
  return group;
}

}  // namespace flashinfer::binding
