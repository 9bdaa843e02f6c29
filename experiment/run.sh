timeout 12 python3 experiment/quick.py 512 2>&1 | tail -10
timeout 20 python3 experiment/check.py 2>&1 | tail -45
FI_PER_SM=1 timeout 10 python3 experiment/quick.py 512 top_p,softmax,renorm,from_probs,min_p 2>&1 | tail -10
timeout 10 python3 -m pytest -q -x tests/sampling/test_sampling_bits.py -k "cuda" -p no:cacheprovider 2>&1 | tail -8
