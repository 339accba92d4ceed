#!/bin/sh
# healthy.sh FOLDER SECONDS: training is healthy while it writes its logs: a file in FOLDER changed
# in the last SECONDS. (That a process exists says little: hung ranks exist.)
[ -n "$(find "$1" -type f -newermt "$2 seconds ago" -print -quit)" ] && exit 0
echo "nothing in $1 was written in the last $2 seconds"
exit 1
