# shellcheck shell=bash
# The environment step of the two set-up commands. Bash sources it with the requested extra of setup.py:
#
#     source launch/environment.sh hf
#
# Afterwards `python` is that of the active environment (venv or conda), or else of .venv in the root of this
# checkout, and the package is installed there, editable, with that extra. The torch of an active environment is kept.
# A stamp in the environment records what was installed from which checkout, so that a repetition takes milliseconds.
# It says "incomplete" while pip works: the run after a killed installation repairs it. A failure that pip reports puts
# the old stamp back, so that nothing already installed is thrown away.

# The only pin of torch; the package accepts any that setup.py allows. With an exact version pip prefers a CPU build
# ("2.13.0+cpu") wherever its index or its folders of wheels have one, and never fetches another release by gigabytes.
TORCH_VERSION=2.13.0

moh_lm_environment() {
    local extra=${1:-} own='' root prefix
    root=$(CDPATH='' cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P) || return
    if ! sed -n '/extras_require/,$p' "$root/setup.py" | grep -qF -- "\"$extra\": "; then
        moh_lm_fail "extra '$extra': is not in setup.py; give one of those there, such as hf"
        return
    fi
    prefix=${VIRTUAL_ENV:-${CONDA_PREFIX:-}}
    [[ $prefix ]] || { own=yes prefix=$root/.venv; }
    if [[ $prefix == *:* ]]; then
        moh_lm_fail "$prefix contains a colon, which separates the entries of PATH: move it"
        return
    fi
    if ! moh_lm_installed; then
        moh_lm_lock || return
        moh_lm_installed || moh_lm_install || return # installed meanwhile, by whoever held the lock
        exec 9<&-
    fi
    export PATH="$prefix/bin:$PATH"
    [[ ! $own ]] || export VIRTUAL_ENV="$prefix"
}

moh_lm_say() { printf '[environment] %s\n' "$*"; }

moh_lm_fail() {
    printf '[environment] error: %s\n' "$*" >&2
    return 1
}

# What an installation depends on: the first line of the stamp. Its other lines are the extras installed.
moh_lm_fingerprint() { printf '%s %s\n' "$(cat "$root/setup.py" "$root/launch/environment.sh" | cksum)" "$root"; }

moh_lm_installed() {
    local stamp=$prefix/moh_lm.stamp
    [[ -x $prefix/bin/python && -f $stamp && $(head -n 1 "$stamp") == "$(moh_lm_fingerprint)" ]] &&
        grep -qxF -- "$extra" "$stamp"
}

moh_lm_suitable() { "$1" -c 'import sys; sys.exit(sys.version_info < (3, 10))' 2>/dev/null; }

moh_lm_find_python() {
    local name
    for name in python3 python python3.14 python3.13 python3.12 python3.11 python3.10; do
        if moh_lm_suitable "$name"; then
            command -v "$name"
            return
        fi
    done
    moh_lm_fail "no Python >= 3.10 on PATH: install one, or activate an environment that has one"
}

# One installation at a time in a checkout: file descriptor 9 holds a lock on setup.py until it is closed.
moh_lm_lock() {
    local python
    python=$(moh_lm_find_python) || return
    if [[ -w $root/setup.py ]]; then # as NFS wants it
        exec 9<>"$root/setup.py" || return
    else
        exec 9<"$root/setup.py" || return
    fi
    "$python" - <<'PYTHON'
import fcntl

try:
    fcntl.flock(9, fcntl.LOCK_EX | fcntl.LOCK_NB)
except BlockingIOError:
    print("[environment] waiting for another installation in this checkout", flush=True)
    fcntl.flock(9, fcntl.LOCK_EX)
except OSError:
    pass  # a file system without locks
PYTHON
}

moh_lm_install() {
    local stamp=$prefix/moh_lm.stamp log=$prefix/moh_lm-install.log extras='' before torch
    [[ ! $own ]] || moh_lm_make_venv || return
    if ! moh_lm_suitable "$prefix/bin/python"; then
        moh_lm_fail "the active environment $prefix has no Python >= 3.10: deactivate it, or activate another"
        return
    fi
    if [[ -f $stamp && $(head -n 1 "$stamp") == "$(moh_lm_fingerprint)" ]]; then
        extras=$(tail -n +2 "$stamp")
    fi
    before=$(cat "$stamp" 2>/dev/null || echo "begun $root")
    if ! { echo incomplete >"$stamp" && : >"$log"; }; then
        moh_lm_fail "the environment $prefix cannot be written: fix this, or activate one of your own"
        return
    fi
    if ! "$prefix/bin/python" -c 'import pip' 2>/dev/null && ! "$prefix/bin/python" -m ensurepip >>"$log" 2>&1; then
        moh_lm_fail "the active environment $prefix has no pip: install it there (such as uv pip install pip)"
        return
    fi

    moh_lm_pip 'pip>=21.3' || return # older ones do not install a package of this form as editable
    torch=$("$prefix/bin/python" -c 'from importlib.metadata import version; print(version("torch"))' 2>/dev/null)
    if [[ ! $torch || ($own && ${torch%%+*} != "$TORCH_VERSION") ]]; then
        torch=$TORCH_VERSION
        moh_lm_say "installing torch $torch, the largest of the packages"
        moh_lm_pip "torch==$torch" || return
    fi
    moh_lm_say "installing moh-lm[$extra] beside torch $torch"
    # Build isolation stays on: only setuptools is fetched for it, which a fresh environment of Python >= 3.12 lacks.
    # The constraint turns any attempt to replace torch into an error.
    moh_lm_pip --constraint <(echo "torch==$torch") --editable ".[$extra]" || return
    if [[ $prefix == *' '* && -f $prefix/bin/deepspeed ]]; then
        # The path of Python stands in the first line of this script, where a space ends it.
        sed -i.old '1s|.*|#!/usr/bin/env python|' "$prefix/bin/deepspeed" || return # BSD's sed wants an ending
    fi
    # In another folder, so that the package is found by its installation.
    if ! (cd "$prefix" && bin/python -c "import deepspeed, moh_lm, torch") >>"$log" 2>&1; then
        moh_lm_show_log "the installed packages cannot be imported"
        return
    fi
    { moh_lm_fingerprint && printf '%s\n' ${extras:+"$extras"} "$extra"; } >"$stamp.new" && mv "$stamp.new" "$stamp"
}

# .venv is made anew if an installation in it was killed, or if it came here with a moved or copied checkout:
# the paths inside are absolute.
moh_lm_make_venv() {
    local stamp=$prefix/moh_lm.stamp python
    if [[ -f $stamp && $(head -n 1 "$stamp") != *" $root" ]]; then
        moh_lm_say "removing a .venv that is incomplete or from another place"
        rm -rf -- "$prefix" || return
    fi
    [[ ! -x $prefix/bin/python ]] || return 0
    python=$(moh_lm_find_python) || return
    if ! "$python" -c 'import ensurepip, venv' 2>/dev/null; then
        moh_lm_fail "$python cannot make environments: install its venv package (Debian, Ubuntu: apt install" \
            "python3-venv), or activate an environment of your own"
        return
    fi
    moh_lm_say "making .venv with $("$python" --version)"
    mkdir -p -- "$prefix" && echo incomplete >"$stamp" && "$python" -m venv "$prefix" &&
        echo "begun $root" >"$stamp"
}

moh_lm_pip() {
    # PIP_USER: a user-wide `user = true` makes pip refuse to work in an environment.
    (cd "$root" && PIP_USER=0 "$prefix/bin/python" -m pip install --progress-bar off "$@") >>"$log" 2>&1 && return
    local code=$?
    if ((code < 128)) && ! tail -n 3 "$log" | grep -q 'cancelled by user'; then # neither killed nor interrupted
        printf '%s\n' "$before" >"$stamp.new" && mv "$stamp.new" "$stamp"
    fi
    moh_lm_show_log "pip failed"
}

moh_lm_show_log() {
    tail -n 20 "$log" >&2
    moh_lm_fail "$1; the end of $log is above"
}

moh_lm_environment "$@"
