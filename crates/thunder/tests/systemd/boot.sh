#!/bin/bash
# boot.sh FOLDER PROGRAM: systemd as process 1 of a machine of its own, in namespaces (root, Linux).
# The machine sees this one's files; what it writes is in FOLDER (not on overlayfs), and stays for
# the next boot. PROGRAM is /opt/thunder there.
set -eu
folder=$1 program=$2 root=$1/root

if [ "${3:-}" != inside ]; then
  # systemd makes cgroups from the root that it sees: it gets one of its own.
  hierarchy=$(awk '$3 == "cgroup2" {print $2; exit}' /proc/mounts)
  group=$hierarchy$(awk -F: '$1 == 0 {print $3}' /proc/self/cgroup)/thunder-$(basename "$folder")
  mkdir -p "$group"
  echo "$group" >"$folder/group"
  echo $$ >"$group/cgroup.procs"
  exec unshare --pid --mount --uts --ipc --net --cgroup --fork --kill-child "$0" "$folder" "$program" inside
fi

mkdir -p "$folder/upper" "$folder/work" "$root"
mount --make-rprivate /
mount -t overlay overlay -o "lowerdir=/,upperdir=$folder/upper,workdir=$folder/work" "$root"
mount -t proc proc "$root/proc"
# Settings of the kernel are this machine's.
mount --bind "$root/proc/sys" "$root/proc/sys"
mount -o remount,bind,ro "$root/proc/sys"
mount -t sysfs -o ro sysfs "$root/sys"
mount -t cgroup2 cgroup2 "$root/sys/fs/cgroup"
mount -t tmpfs -o mode=755 dev "$root/dev"
for device in null zero full random urandom tty; do
  touch "$root/dev/$device"
  mount --bind "/dev/$device" "$root/dev/$device"
done
ln -s /proc/self/fd "$root/dev/fd"
mkdir "$root/dev/shm"
mount -t tmpfs -o mode=1777 shm "$root/dev/shm"
mount -t tmpfs -o mode=755 run "$root/run"
mount -t tmpfs -o mode=1777 tmp "$root/tmp"
touch "$root/opt/thunder"
mount --bind "$program" "$root/opt/thunder"
ip link set lo up

# At the first boot: none of this machine's services.
if [ ! -e "$folder/booted" ]; then
  touch "$folder/booted"
  units=$root/etc/systemd/system
  rm -rf "$units"
  mkdir -p "$units"
  ln -s /lib/systemd/system/multi-user.target "$units/default.target"
  ln -s /dev/null "$units/systemd-journald-audit.socket"
fi

mkdir -p "$root/before"
cd "$root"
pivot_root . before
umount -l /before
exec env -i container=thunder-test PATH=/usr/sbin:/usr/bin:/sbin:/bin \
  /lib/systemd/systemd --log-target=console --show-status=no
