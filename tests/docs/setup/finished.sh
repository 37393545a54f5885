# finished.sh - a finished run of two steps in runs/done.
rm -rf runs/done
LUATRAIN_MAX_STEPS= build/luatrain --quiet --out runs/done \
    train_lenet.lua --data synthetic:28x28x1/10/128 --epochs 1 >/dev/null
