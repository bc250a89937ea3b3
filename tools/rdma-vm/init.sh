#!/bin/busybox sh
# Process 1 of the guest: modules, the host's files below a throw-away layer, then guest.sh, then
# power off.
/bin/busybox --install -s /bin
export PATH=/bin
mkdir -p /proc /dev /host /layer /root /job
mount -t proc proc /proc
mount -t devtmpfs dev /dev
while read -r module; do insmod "/modules/$module" || echo "init: cannot load $module"; done </modules/order

nine=trans=virtio,version=9p2000.L,msize=512000
mount -t 9p -o $nine,ro,cache=loose root /host
mount -t tmpfs layer /layer
mkdir /layer/upper /layer/work
mount -t overlay -o lowerdir=/host,upperdir=/layer/upper,workdir=/layer/work root /root
mount -t proc proc /root/proc
mount -t sysfs sys /root/sys
mount -t devtmpfs dev /root/dev
mkdir -p /root/dev/shm /root/dev/pts
mount -t tmpfs shm /root/dev/shm
mount -t devpts pts /root/dev/pts
mount -t tmpfs run /root/run
mkdir /root/run/job
mount -t 9p -o $nine,cache=none job /root/run/job
tag=0
while read -r dir; do
  mount -t 9p -o $nine,cache=mmap w$tag "/root$dir"
  tag=$((tag + 1))
done </root/run/job/writable

# One reader copies to the port, which can be opened only once. It ends with the last writer, so
# processes that the command left running are killed first.
mkfifo /out
cat /out >/dev/vport0p1 &
copier=$!
setsid chroot /root /bin/bash /run/job/guest.sh </dev/null >/out 2>&1
for dir in /proc/[0-9]*; do
  pid=${dir#/proc/}
  [ "$pid" = 1 ] || [ "$pid" = $copier ] || kill -9 "$pid" 2>/dev/null
done
wait $copier
poweroff -f
