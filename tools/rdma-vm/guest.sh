# Runs in the guest on the host's files: makes the links, runs the command and writes its status.
export PATH=/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin
. /run/job/shape
export RDMA_LINKS=/run/rdma-links
ulimit -l unlimited
ip link set lo up

# Both ends of every link are in this one network namespace (rxe devices cannot leave it). So
# packets from a local address must be accepted, and none dropped for lack of space, since UC would
# lose a message.
cd /proc/sys/net || exit 125
echo 1 >ipv4/conf/all/accept_local
for where in all default; do echo 0 >ipv4/conf/$where/rp_filter; done
echo 30000 >core/netdev_max_backlog

veth_mtu=4200 # leaves room for a path MTU of 4096, several times faster here than 1024
all_cpus=$(printf %x $(((1 << $(nproc)) - 1)))

link_end() { # RANK PEER LINK NAME IP PEER_NAME PEER_IP
  ip addr add "$5/30" dev "$4"
  ip neigh replace "$7" dev "$4" lladdr "$(cat "/sys/class/net/$6/address")" nud permanent
  # Each flow stays on one CPU: UC drops a message if its packets overtake each other.
  echo "$all_cpus" >"/sys/class/net/$4/queues/rx-0/rps_cpus"
  rdma link add "rdma_$4" type rxe netdev "$4"
  echo "$1 $2 $3 rdma_$4 $5 rdma_$6 $7" >>$RDMA_LINKS
}

net=0
for ((a = 0; a < ranks; a++)); do
  for ((b = a + 1; b < ranks; b++)); do
    for ((k = 0; k < links; k++)); do
      x=r${a}p${b}l$k y=r${b}p${a}l$k
      ip link add "$x" mtu $veth_mtu type veth peer name "$y" mtu $veth_mtu
      ip link set "$x" up
      ip link set "$y" up
      link_end "$a" "$b" "$k" "$x" "10.88.$net.1" "$y" "10.88.$net.2"
      link_end "$b" "$a" "$k" "$y" "10.88.$net.2" "$x" "10.88.$net.1"
      net=$((net + 1))
    done
  done
done

# Without this, ranks that spin delay the kernel's packet work by whole scheduler ticks.
for pid in $(pgrep ksoftirqd); do chrt -f -p 1 "$pid"; done
mount -t debugfs debugfs /sys/kernel/debug
for knob in min_granularity_ns latency_ns; do echo 100000 >/sys/kernel/debug/sched/$knob; done

bash /run/job/command
echo $? >/run/job/status
