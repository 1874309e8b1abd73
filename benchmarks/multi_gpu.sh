#!/usr/bin/env bash
# Runs the project's commands on several GPUs and leaves one JSON document; see --help. Needs python3, torch and mgtp.
exec "${PYTHON:-python3}" "$(dirname "$0")/multi_gpu" "$@"
