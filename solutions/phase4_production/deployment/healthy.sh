#!/bin/sh
# healthy.sh FOLDER SECONDS: training is healthy while it gets on: a log in FOLDER grew in the last
# SECONDS. That a process exists says little, and neither does a heartbeat file: a thread of a hung
# rank writes it, too.
[ -n "$(find "$1" -path '*/heartbeat' -prune -o -type f -newermt "$2 seconds ago" -print -quit)" ] \
    && exit 0
echo "no log in $1 has grown in the last $2 seconds"
exit 1
