#!/usr/bin/env bash
# again.sh TRIES SECONDS COMMAND …: run COMMAND; after a crash or a hang wait SECONDS and run it again,
# TRIES times at most.
#
# Compose's `restart: on-failure` can't tell a crash from a refusal: it would try again what can never
# be. So a container runs this instead and has `restart: "no"`. It ends with COMMAND's last status
# (solutions/phase4_production/exit_codes.py): 0 done, 75 saved, because the container was told to stop,
# 78 refused, 126 and 127 not to be started; anything else is a crash with no tries left.
set -u
tries=$1
seconds=$2
shift 2
child=
stopping=
told=
stop() {
    stopping=yes
    if [ "$child" ] && [ -z "$told" ]; then
        kill -TERM "$child" 2>/dev/null
        told=yes # once: a second signal would end the ranks before they have saved
    fi
}
trap stop TERM INT

for ((try = 0; ; try++)); do
    "$@" &
    child=$!
    if [ "$stopping" ]; then stop; fi # the signal came before there was a child
    wait "$child"
    status=$?
    if [ "$stopping" ]; then # the signal may have ended the wait, and not the child
        wait "$child"
        status=$?
    fi
    child=
    case $status in 0 | 78 | 126 | 127) exit "$status" ;; esac
    if [ "$stopping" ] || [ "$try" -ge "$tries" ]; then exit "$status"; fi
    echo "again: status $status, try $((try + 1)) of $tries" >&2
    for ((waited = 0; waited < seconds; waited++)); do
        sleep 1 # a trap runs after it
        if [ "$stopping" ]; then exit "$status"; fi
    done
done
