n=$1; shift
time nvcc -gencode=arch=compute_90a,code=sm_90a -std=c++17 -O3 -Xptxas=-v -c -I./include /tmp/g/k.cu -o /tmp/g/$n.o "$@" 2>&1 | grep -v "^$" | tail -8
