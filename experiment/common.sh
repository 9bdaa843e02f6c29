tree() {  # VARIANT: a tree of its own
  T=/tmp/mla_trees/$1; [ -d $T ] || { mkdir -p $T; cp -r flashinfer csrc include tests pyproject.toml $T/; [ -d experiment/$1 ] && cp experiment/$1/*.cuh $T/include/flashinfer/cuda/mla/; }
  echo $T
}
