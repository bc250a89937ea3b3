# Sourced: network namespaces with wires between them, so that ranks on one machine seem to be on
# several. Needs root.
# The namespaces and the folder $work end with the script.

holders=()
trap 'kill "${holders[@]}" 2>/dev/null || true; rm -rf "$work"' EXIT
work=$(mktemp -d)

# Runs a command in a rank's namespace: inside RANK COMMAND...
inside() { nsenter --net="/proc/${holders[$1]}/ns/net" "${@:2}"; }

# Makes a namespace for each rank: hosts COUNT
hosts() {
    local rank
    # A namespace lives as long as a process in it.
    for ((rank = 0; rank < $1; rank++)); do
        unshare --net sleep 3600 &
        holders+=($!)
    done
    sleep 0.5
    for ((rank = 0; rank < $1; rank++)); do inside $rank ip link set lo up; done
}

# Joins two hosts: wire RANK DEVICE ADDRESS RANK DEVICE ADDRESS
wire() {
    inside "$1" ip link add "$2" type veth peer name "$5" netns "${holders[$4]}"
    inside "$1" ip addr add "$3" dev "$2"
    inside "$4" ip addr add "$6" dev "$5"
    # Short packets allow a short burst; with a long burst, short messages would not see the rate.
    inside "$1" ip link set "$2" up gso_max_size 16384
    inside "$4" ip link set "$5" up gso_max_size 16384
}

# Limits what a device sends: limit RANK DEVICE RATE, as tc writes it
limit() {
    # A burst of a few of the kernel's packets; a longer one would hide the rate from short
    # messages.
    inside "$1" tc qdisc replace dev "$2" root tbf rate "$3" burst 64kb latency 50ms
}

# Ranks 0 and 1 in a namespace each, and the environment of their programs.
two_hosts() {
    hosts 2
    wire 0 wire0 10.77.0.1/24 1 wire1 10.77.0.2/24
    export THUNDER_WORLD_SIZE=2 THUNDER_TRANSPORT=tcp THUNDER_COORDINATOR=10.77.0.1:7777 THUNDER_SECRET=wire
}

# Limits both directions between two_hosts: limit_both GBIT_PER_S
limit_both() {
    limit 0 wire0 "${1}gbit"
    limit 1 wire1 "${1}gbit"
}
