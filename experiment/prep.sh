# Builds every variant in a tree of its own, and what tests and cost.py ask for. In the root of a checkout.
export FLASHINFER_WORKSPACE_DIR=${FLASHINFER_WORKSPACE_DIR:-/tmp/mla_ws} W=$PWD
mkdir -p /tmp/mla_trees "$FLASHINFER_WORKSPACE_DIR"
for v in v3 v4 v5 v6; do
  T=/tmp/mla_trees/$v; rm -rf $T; mkdir -p $T
  cp -r flashinfer csrc include pyproject.toml $T/; cp experiment/$v/*.cuh $T/include/flashinfer/cuda/mla/
  (cd $T && PYTHONPATH=$T timeout 110 python $W/experiment/build.py $v sm90a) &
done
export PYTHONPATH=$W
timeout 110 python experiment/build.py base sm90a sm90a+profiler cuda cuda+profiler &
BUILD=1 timeout 110 python experiment/cost.py "prefill fa3" &
timeout 110 python -m pytest -q -n 3 -p no:benchmark tests/profiler -k "not cpu" --tb=line 2>&1 | tail -5 &
wait
