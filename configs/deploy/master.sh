#!/bin/sh
# master.sh RUN_FOLDER ARGUMENT...: the master of this run, which goes on where the run has begun.
set -eu
folder=$1
shift
if [ -e "$folder/journal.db" ]; then
  set -- --resume "$folder" "$@"
fi
exec python run.py --role master "$@" "run_dir=$(dirname "$folder")" "name=$(basename "$folder")"
