#!/bin/sh
# The commands of one Mac, whose state is the folder $FAKE. Linked under the name of each command.
# $DESK is the folder of all Macs: "drop" and "fail" there count commands down to a fault.
set -u
me=${0##*/}
fail() { echo "$1" >&2; exit "${2:-1}"; }

# Counts $1 down; succeeds when it is at its end.
due() {
  [ -f "$DESK/$1" ] || return 1
  left=$(cat "$DESK/$1")
  [ "$left" -gt 0 ] || return 0
  echo $((left - 1)) >"$DESK/$1"
  return 1
}

# Without other programs: ifconfig is run often.
show() { # interface
  read -r flags <"$FAKE/interfaces/$1/flags"
  read -r mtu <"$FAKE/interfaces/$1/mtu"
  read -r mac <"$FAKE/interfaces/$1/mac"
  read -r status <"$FAKE/interfaces/$1/status"
  member=
  while read -r name; do
    if [ "$name" = "$1" ]; then member=PROMISC,; fi
  done <"$FAKE/members"
  printf '%s: flags=8863<%sBROADCAST,SMART,RUNNING,%sSIMPLEX,MULTICAST> mtu %s\n\tether %s\n' \
    "$1" "$flags" "$member" "$mtu" "$mac"
  while read -r address mask; do
    printf '\tinet %s netmask %s\n' "$address" "$mask"
  done <"$FAKE/interfaces/$1/inet"
  printf '\tstatus: %s\n' "$status"
}

show_bridge() {
  echo 'bridge0: flags=8863<UP,BROADCAST,SMART,RUNNING,SIMPLEX,MULTICAST> mtu 1500'
  while read -r name; do
    printf '\tmember: %s flags=3<LEARNING,DISCOVER>\n' "$name"
  done <"$FAKE/members"
}

hex() { # a mask like 255.255.255.252
  old=$IFS
  IFS=.
  # shellcheck disable=SC2086 # four words
  set -- $1
  IFS=$old
  printf '0x%02x%02x%02x%02x' "$1" "$2" "$3" "$4"
}

ifconfig() {
  case $1 in
    -a) for i in "$FAKE"/interfaces/*; do show "${i##*/}"; done; show_bridge; exit ;;
    -l) echo "$(ls "$FAKE/interfaces" | tr '\n' ' ')bridge0"; exit ;;
    bridge0)
      case ${2:-} in
        '') show_bridge ;;
        deletem)
          grep -qx "$3" "$FAKE/members" || fail "ifconfig: BRDGDEL $3: No such file or directory"
          sed -i "/^$3\$/d" "$FAKE/members" ;;
        addm)
          [ -d "$FAKE/interfaces/$3" ] || fail "ifconfig: BRDGADD $3: No such process"
          grep -qx "$3" "$FAKE/members" && fail "ifconfig: BRDGADD $3: Device busy"
          echo "$3" >>"$FAKE/members"
          sort -o "$FAKE/members" "$FAKE/members" ;;
        *) fail "ifconfig: $2: bad value" ;;
      esac
      exit ;;
  esac
  dir=$FAKE/interfaces/$1
  [ -d "$dir" ] || fail "ifconfig: interface $1 does not exist"
  case "${2:-} ${4:-}" in
    ' ') show "$1" ;;
    'up ') echo UP, >"$dir/flags" ;;
    'down ') echo >"$dir/flags" ;;
    'mtu ') echo "$3" >"$dir/mtu" ;;
    'inet netmask') echo "$3 $(hex "$5")" >>"$dir/inet" ;;
    'inet -alias')
      grep -q "^$3 " "$dir/inet" || fail "ifconfig: ioctl (SIOCDIFADDR): Can't assign requested address"
      sed -i "/^$3 /d" "$dir/inet" ;;
    *) fail "ifconfig: $*: bad value" ;;
  esac
}

number() { # an address like 10.0.0.1
  old=$IFS
  IFS=.
  # shellcheck disable=SC2086 # four words
  set -- $1
  IFS=$old
  echo $((($1 << 24) + ($2 << 16) + ($3 << 8) + $4))
}

# The interface of Mac $1 that has an address in network $2, is up and in no bridge.
holder() {
  shift_by=$((32 - ${2#*/}))
  wanted=$(($(number "${2%/*}") >> shift_by))
  for interface in "$DESK/$1"/interfaces/*; do
    while read -r address mask; do
      [ $(($(number "$address") >> shift_by)) = "$wanted" ] || continue
      ! grep -qx "${interface##*/}" "$DESK/$1/members" && grep -q UP "$interface/flags" || continue
      echo "${interface##*/}"
      return
    done <"$interface/inet"
  done
}

# A rank of `thunder bench comm` at one end of a cable. It fails if the cable's network does not
# lead over one of the cables in $DESK/../wires: lines of a Mac and its interface, the other Mac and
# its interface, Gbit/s, and perhaps "slow" or "fails".
bench() {
  [ "$1 $2" = "bench comm" ] || fail "no double for thunder $*"
  read -r me <"$FAKE/name"
  network=${THUNDER_CABLES%%=*}
  here=$(holder "$me" "$network")
  while read -r one port other there gbits fault; do
    if [ "$other $there" = "$me $here" ]; then
      other=$one there=$port
    elif [ "$one $port" != "$me $here" ]; then
      continue
    fi
    [ "$(holder "$other" "$network")" = "$there" ] || fail "error: $network leads nowhere"
    [ "$fault" != fails ] || fail "error: rank $((1 - THUNDER_RANK)) on $other cannot be reached: no packet passes"
    per_gbit=60 # in thousandths of GB/s: about half of the cable, as TCP has
    case $* in *"--transport rdma"*)
      per_gbit=110
      grep -q "rdma_$here " "$FAKE/devices" || fail "error: no device rdma_$here" ;;
    esac
    [ "$fault" != slow ] || per_gbit=2
    [ "$THUNDER_RANK" = 0 ] || exit 0
    found=$((gbits * per_gbit))
    printf '{"rows":[{"bytes":4096,"median_us":%s,"bus_gb_per_s":0.1},' "$((20000 / per_gbit))"
    printf '{"bytes":16777216,"median_us":9000,"bus_gb_per_s":%d.%03d}]}\n' "$((found / 1000))" "$((found % 1000))"
    exit 0
  done <"$DESK/../wires"
  fail "error: no cable at ${here:-any interface} of $me for $network"
}

# The interface that a command names is pulled: it is kept in $DESK/../away until somebody plugs it
# in again. A command without an interface leaves the fault for the next one.
vanish() {
  for word; do
    case $word in en[0-9]*) ;; *) continue ;; esac
    [ -d "$FAKE/interfaces/$word" ] || continue
    read -r name <"$FAKE/name"
    mkdir -p "$DESK/../away/$name"
    mv "$FAKE/interfaces/$word" "$DESK/../away/$name/$word"
    sed -i "/^$word\$/d" "$FAKE/members"
    rm "$DESK/vanish"
    return
  done
}

# RDMA ports that come up once their interfaces are out of the bridge.
states_after_bridge() {
  while read -r name guid; do
    case $name in rdma_*) ;; *) continue ;; esac
    state='PORT_DOWN (1)'
    read -r status <"$FAKE/interfaces/${name#rdma_}/status"
    [ "$status" != active ] || grep -qx "${name#rdma_}" "$FAKE/members" || state='PORT_ACTIVE (4)'
    printf 'hca_id:\t%s\n\tnode_guid:\t%s\n\t\tport:\t1\n\t\t\tstate:\t\t\t%s\n\n' "$name" "$guid" "$state"
  done <"$FAKE/devices"
}

case $me in
  ssh)
    while [ $# -gt 0 ]; do
      case $1 in
        -o) shift 2 ;;
        -*) shift ;;
        *) break ;;
      esac
    done
    FAKE=$DESK/$1
    [ -d "$FAKE" ] || fail "ssh: Could not resolve hostname $1" 255
    shift
    THUNDER_ROOT=$FAKE/root
    SSH_CONNECTION=$(cat "$FAKE/reached")
    PATH=${DESK%/*}/bin:$PATH
    export FAKE THUNDER_ROOT SSH_CONNECTION PATH
    exec sh -c "$*" ;;
  sudo)
    while [ $# -gt 0 ]; do
      case $1 in
        -n) shift ;;
        *) break ;;
      esac
    done
    [ "$*" = true ] && exit 0
    echo "$*" >>"$FAKE/log"
    due fail && { rm "$DESK/fail"; fail "Operation not permitted"; }
    due vanish && vanish "$@"
    # A connection that is lost after the command has run: ssh says so, and nobody knows the rest.
    if due drop; then "$@" >/dev/null 2>&1; fail "Connection closed by remote host" 255; fi
    exec "$@" ;;
  id) echo 501 ;;
  uname) echo Darwin ;;
  hostname) cat "$FAKE/name" ;;
  sw_vers) cat "$FAKE/version" ;;
  sysctl)
    case $1 in
      iogpu.wired_limit_mb=*) echo "${1#*=}" >"$FAKE/gpu" ;;
      *) cat "$FAKE/sysctl"; echo "iogpu.wired_limit_mb: $(cat "$FAKE/gpu")" ;;
    esac ;;
  osascript)
    read -r mib <"$FAKE/gpu"
    [ -f "$FAKE/working-set" ] || fail "osascript: no device"
    if [ "$mib" = 0 ]; then cat "$FAKE/working-set"; else echo $((mib << 20)); fi ;;
  rdma_ctl) [ -f "$FAKE/rdma" ] || exit 127; cat "$FAKE/rdma" ;;
  system_profiler)
    [ ! -f "$FAKE/no-profile" ] || fail "system_profiler: no answer"
    cat "$FAKE/thunderbolt.json" ;;
  networksetup)
    case $1 in
      -listallhardwareports) cat "$FAKE/ports" ;;
      -listvalidMTUrange) echo "Valid MTU Range: 1280-9000" ;;
      *) fail "$me: $1" ;;
    esac ;;
  ifconfig) ifconfig "$@" ;;
  netstat) cat "$FAKE/routes" ;;
  ibv_devices) cat "$FAKE/devices" ;;
  ibv_devinfo)
    if [ -f "$DESK/rdma-after-bridge" ]; then states_after_bridge; else cat "$FAKE/states"; fi ;;
  pmset)
    case $1 in
      -g) cat "$FAKE/power" ;;
      -c) sed -i "s/lowpowermode .*/lowpowermode         $3/" "$FAKE/power" ;;
    esac ;;
  socketfilterfw) cat "$FAKE/firewall" ;;
  launchctl)
    case $1 in
      print-disabled) cat "$FAKE/services" ;;
      print) [ -f "$FAKE/job" ] || exit 113 ;;
      bootstrap)
        [ -f "$3" ] && ! [ -f "$FAKE/job" ] || fail "Bootstrap failed: 5: Input/output error" 5
        touch "$FAKE/job"
        # launchd starts it at once.
        sh "$THUNDER_ROOT/Library/Application Support/Thunderhead/cables.sh" ;;
      bootout) [ -f "$FAKE/job" ] || fail "Boot-out failed: 3: No such process" 3; rm "$FAKE/job" ;;
    esac ;;
  thunder)
    # In examples/desk.rs: the real one, for all but ranks.
    if [ -n "${THUNDER:-}" ] && [ "$1 ${2:-}" != "bench comm" ]; then exec "$THUNDER" "$@"; fi
    bench "$@" ;;
  *) fail "no double for $me" 127 ;;
esac
