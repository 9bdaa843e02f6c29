cd .bench; chmod +x *
for v in base p1t0 p1t1 p1t2 p1t3 u2t0 u4t0 u8t0 u4t1 u4t2 u8t2 some0 some3; do timeout 5 ./$v $v K; done
for v in base p1t2 u4t0 some0; do timeout 5 ./$v $v m; done
for v in p1t2 u4t0 some0; do timeout 6 compute-sanitizer --tool racecheck ./$v $v K small 2>&1 | grep -v "^$" | tail -6; done
cd ..
timeout 16 python3 .bench/moe.py
timeout 18 python3 -m pytest -q -x -n 4 -k "cuda and (e4m3 or fp8 or float8)" tests/gemm 2>&1 | tail -8
