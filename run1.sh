cd /tmp/h/x7; export OMP_NUM_THREADS=1 PYTHONPATH=/tmp/h/x7:/tmp/h/peftlib
time /work/main/.venv/bin/torchrun --nproc-per-node 2 "$@"
