timeout 21 ./experiment/lab/declab
timeout -s INT 28 python3 -m pytest -q -x --no-header -p no:cacheprovider -n 6 tests/decode -k "cuda or graph or fa3" 2>&1 | tail -25
