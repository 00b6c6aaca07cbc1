#!/usr/bin/env bash
''':' # A no-op to bash. To Python it opens a docstring that ends above the last three lines.
#
# MoH-ViT-S of the paper, with 80% of the heads: 300 epochs of ImageNet-1K.
#
#     deepspeed launch/train_moh_vit_s.sh           or as told in train_moh_vit_b.sh, whose recipe this is
#
# Flags of python -m moh_lm.vision vit that follow the script win over the values of both, for example:
#
#     --preset S-75 --checkpoint-dir runs/s-75      MoH-ViT-S with 75% of the heads
#     --preset S --checkpoint-dir runs/s            TransNeXt-S, the dense baseline

[[ $RANK_PYTHON ]] || exec python "$(dirname -- "$0")/ranks.py" "$0" "$@"

exec bash "$(dirname -- "$0")/train_moh_vit_b.sh" --preset S-80 --checkpoint-dir runs/moh-vit-s-80 --script "$0" "$@"
'''
import os, signal, sys
signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGHUP})  # ranks.py blocks them
os.execvpe("bash", ["bash", *sys.argv], os.environ | {"RANK_PYTHON": sys.executable})  # '
