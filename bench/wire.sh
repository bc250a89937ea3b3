# Sourced: two network namespaces and a wire between them, for ranks of one machine that shall seem to be on two. Takes root.
# Sets up 10.77.0.1 and 10.77.0.2; they end with the script.

holders=()
trap 'kill "${holders[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
work=$(mktemp -d)
# A namespace lives as long as a process in it.
for rank in 0 1; do
    unshare --net sleep 3600 &
    holders+=($!)
done
sleep 0.5

# Runs a command as this rank's host would: inside RANK COMMAND...
inside() { nsenter --net="/proc/${holders[$1]}/ns/net" "${@:2}"; }

inside 0 ip link add wire0 type veth peer name wire1 netns "${holders[1]}"
for rank in 0 1; do
    inside $rank ip link set lo up
    inside $rank ip addr add "10.77.0.$((rank + 1))/24" dev "wire$rank"
    # Short packets, for a short burst: with a long one, the median of a short message would not see the rate.
    inside $rank ip link set "wire$rank" up gso_max_size 16384
done

# Limits both directions to a rate: limit GBIT_PER_S
limit() {
    local rank
    for rank in 0 1; do
        # A burst of a few of the packets that the kernel makes; more would hide the rate from short messages.
        inside $rank tc qdisc replace dev "wire$rank" root tbf rate "${1}gbit" burst 64kb latency 50ms
    done
}

# What both ranks' programs read from their environment.
export THUNDER_WORLD_SIZE=2 THUNDER_TRANSPORT=tcp THUNDER_COORDINATOR=10.77.0.1:7777 THUNDER_SECRET=wire
