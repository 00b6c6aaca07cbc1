# shellcheck shell=bash
# What the quickstarts and the comparisons of forms have in common; bash sources it.

unset CDPATH # with it, cd prints
root=$(cd -- "$(dirname -- "${BASH_SOURCE[0]}")/.." && pwd -P)

# --help shows the opening comment of the script. Flags of the program that it starts are in python -m ... --help.
for text in "$@"; do
    if [[ $text == --help || $text == -h ]]; then
        sed -n '2,/^[^#]/s/^# \{0,1\}//p' "$0"
        exit
    fi
done

# begin SCRIPT [OUT]: makes the directory `out`, OUT or runs/SCRIPT, and goes to the root of the checkout.
begin() {
    out=${2:-$root/runs/$1}
    if [[ $out == -* ]]; then
        echo "usage: bash launch/$1.sh [OUT ...]; got OUT = $out" >&2
        exit 2
    fi
    if ! { mkdir -p -- "$out" && [[ -d $out && -w $out ]]; } 2>/dev/null; then
        echo "launch/$1.sh: OUT $out: cannot be written; give another directory" >&2
        exit 2
    fi
    out=$(cd -- "$out" && pwd)
    cd -- "$root"
}

# from_here ARGUMENT...: the array `given`, in which flags that name files have absolute paths; `begin` goes elsewhere.
from_here() {
    local flag='' name='--(data-dir|validation-dir|config|eval-tasks|recorded)' text
    given=()
    for text in "$@"; do
        if [[ $flag =~ ^$name$ && $text != /* ]]; then
            given+=("$PWD/$text")
        elif [[ $text =~ ^$name=[^/] ]]; then
            given+=("${text%%=*}=$PWD/${text#*=}")
        else
            given+=("$text")
        fi
        flag=$text
    done
}

# trains_in_out: refuses flags in `given` without which OUT would lack the checkpoint that is exported.
trains_in_out() {
    local text
    for text in ${given[@]+"${given[@]}"}; do
        if [[ $text =~ ^--(checkpoint-dir|dry-run)(=|$) ]]; then
            echo "$0: ${text%%=*}: this script trains in OUT and exports from there; leave it out" >&2
            exit 2
        fi
    done
}

# step TEXT: a heading, numbered; steps_total is the number of them.
step() {
    steps_done=$((${steps_done:-0} + 1))
    printf '\n[%d/%d] %s\n' "$steps_done" "$steps_total" "$*"
}

# Show a command as it could be typed in the root of the repository, then run it.
run() {
    printf '+'
    printf ' %q' "$@"
    printf '\n'
    "$@"
}

# up_to_date RESULT INPUT...: the result exists and no input is newer.
up_to_date() {
    local result=$1 input
    [[ -e $result ]] || return
    for input in "${@:2}"; do
        [[ ! $input -nt $result ]] || return
    done
    echo "already there: $result"
}

# Threads: the cores that this process may use, also in a container with a quota; a small model gains nothing beyond 8.
set_threads() {
    local threads cores quota period
    threads=$(nproc 2>/dev/null || getconf _NPROCESSORS_ONLN)
    if [[ -r /sys/fs/cgroup/cpu.max ]] && read -r quota period </sys/fs/cgroup/cpu.max && [[ $quota != max ]]; then
        cores=$(((quota + period - 1) / period))
        threads=$((cores < threads ? cores : threads))
    fi
    export OMP_NUM_THREADS=$((threads < 8 ? threads : 8))
    export OMP_WAIT_POLICY=PASSIVE # threads that spin while they wait stall one another when the machine has other work
    echo "$(python --version), $(command -v python), $OMP_NUM_THREADS threads"
}

# set_up EXTRA: the first step, the environment with this extra of setup.py.
set_up() {
    step "Environment"
    source launch/environment.sh "$1"
    set_threads
}

# one_thread_a_run: a small model gains little from more threads, and as many runs at a time gain all. With GPUs the
# command itself knows how many (studies/runs.py).
one_thread_a_run() {
    jobs=()
    python -c "import sys, torch; sys.exit(torch.cuda.is_available())" && jobs=(--jobs "$OMP_NUM_THREADS")
    export OMP_NUM_THREADS=1
}

# make_data PIECES OUT: in three steps a corpus, a SentencePiece model and shards below OUT.
make_data() {
    local out=$2 corpus
    step "Corpus: three sources of text from the Python installation"
    corpus=("$out/corpus/topics.jsonl" "$out/corpus/docstrings.jsonl.zst" "$out/corpus/library.json.gz") # written last
    up_to_date "${corpus[2]}" || run python launch/quickstart_corpus.py "$out/corpus"

    step "Tokenizer: a SentencePiece model of $1 pieces"
    up_to_date "$out/tokenizer.model" "${corpus[@]}" ||
        run python data_prep/tokenize.py train --input "${corpus[@]}" --vocab-size "$1" --output "$out/tokenizer.model"

    step "Shards: the documents as tokens"
    run python data_prep/tokenize.py --tokenizer "$out/tokenizer.model" --output "$out/data" \
        --workers "$OMP_NUM_THREADS" --source topics="${corpus[0]}" --source docstrings="${corpus[1]}" \
        --source library="${corpus[2]}"
}

# make_english OUT: the same of technical English, three kinds of text from packages in fixed versions.
make_english() {
    local out=$1 kind sources=()
    for kind in docstrings prose code; do
        sources+=(--source "$kind=$out/corpus/$kind.jsonl.zst")
    done

    step "Corpus: three kinds of technical English"
    up_to_date "$out/corpus/corpus.json" || run python -m studies.atlas_corpus "$out/corpus"

    step "Tokenizer: a SentencePiece model of 4,096 pieces"
    up_to_date "$out/tokenizer.model" "$out/corpus/corpus.json" ||
        run python data_prep/tokenize.py train "${sources[@]}" --data-mix docstrings=4 prose=1 code=5 \
            --sample-bytes 24M --vocab-size 4096 --output "$out/tokenizer.model"

    step "Shards: the documents as tokens"
    run python data_prep/tokenize.py --tokenizer "$out/tokenizer.model" --output "$out/data" \
        --workers "$OMP_NUM_THREADS" "${sources[@]}"
}

# compare PROGRAM MAKE MIX [OUT] [FLAGS]: python -m studies.PROGRAM on the MIX of what the command MAKE makes in OUT, or
# on the --data-dir among FLAGS.
compare() {
    local program=$1 make=$2 mix=$3 data=()
    from_here "${@:4}"
    set -- ${given[@]+"${given[@]}"} # an empty array ends a bash before 4.4
    if [[ ${1:-} && $1 != -* ]]; then
        begin "$program" "$1"
        shift
    else
        begin "$program"
    fi

    steps_total=2
    if [[ " $* " != *" --data-dir"* ]]; then
        steps_total=5
        read -ra data <<<"--data-mix $mix"
        data+=(--data-dir "$out/data")
    fi
    if python3 -c "import studies.$program" 2>/dev/null; then # before anything is made, if this Python can read the flags
        python3 -m "studies.$program" "$out" ${data[@]+"${data[@]}"} "$@" --check || exit
    fi

    set_up plot
    if [[ ${#data[@]} -gt 0 ]]; then
        $make "$out"
    fi

    step "Runs and report"
    jobs=(--jobs 1) # the sizes of a ladder follow one another
    [[ $program == ladder ]] || one_thread_a_run
    set -- "$out" ${jobs[@]+"${jobs[@]}"} ${data[@]+"${data[@]}"} "$@"
    echo "+ python -m studies.$program $*"
    exec nice -n 19 python -m "studies.$program" "$@" # a signal to this process reaches it
}
