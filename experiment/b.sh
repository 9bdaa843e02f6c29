# name include flags
n=$1; inc=$2; shift 2
nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -I$inc /tmp/g/bench.cu -o ./.bench/$n "$@" 2>&1 | grep -iE "error|C75" | head -20
