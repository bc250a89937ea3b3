# Prints what `thunder mac` reads of a machine, section by section: a line "@@ NAME STATUS", then
# the command's output. Changes nothing and needs no sudo.
LC_ALL=C
export LC_ALL
PATH=$PATH:/usr/sbin:/sbin:/usr/libexec/ApplicationFirewall
root=${THUNDER_ROOT:-}

section() { # name, command...
  name=$1
  shift
  text=$("$@" 2>/dev/null)
  printf '@@ %s %s\n' "$name" "$?"
  case $text in
    *@@*) printf '%s\n' "$text" | sed 's/^@@/ @@/' ;;
    *) printf '%s\n' "$text" ;;
  esac
}

# A command that may hang is ended after some seconds, and the probe goes on.
within() { # seconds, command...
  limit=$1
  shift
  "$@" &
  work=$!
  (sleep "$limit"; kill "$work") >/dev/null 2>&1 &
  guard=$!
  wait "$work"
  status=$?
  kill "$guard" 2>/dev/null
  return "$status"
}

# The value of each file that exists, as PATH=VALUE.
values() {
  for file; do
    if [ -f "$file" ]; then printf '%s=%s\n' "${file#"$root"}" "$(head -c 200 "$file" | head -n 1)"; fi
  done
  return 0
}

macos() {
  section version sw_vers -productVersion
  section sysctl sysctl hw.model machdep.cpu.brand_string hw.memsize iogpu.wired_limit_mb
  # Only Metal says what the GPU may hold where iogpu.wired_limit_mb is 0.
  section gpu within 10 osascript -l JavaScript -e \
    'ObjC.import("Metal"); String($.MTLCreateSystemDefaultDevice().recommendedMaxWorkingSetSize)'
  section rdma rdma_ctl status
  section thunderbolt system_profiler SPThunderboltDataType -json
  section ports networksetup -listallhardwareports
  section interfaces ifconfig -a
  section routes netstat -rn -f inet
  section devices ibv_devices
  section device-states ibv_devinfo
  section power pmset -g custom
  section firewall socketfilterfw --getglobalstate
  section services launchctl print-disabled system
  section job launchctl print system/org.thunderhead.cables
  section job-folder test -d "$root/Library/Application Support/Thunderhead"
  section job-script cat "$root/Library/Application Support/Thunderhead/cables.sh"
  section job-unit cat "$root/Library/LaunchDaemons/org.thunderhead.cables.plist"
  section job-cables cat "$root/Library/Application Support/Thunderhead/cables"
  for device in $(networksetup -listallhardwareports | sed -n '/^Hardware Port: Thunderbolt [0-9]/{n;s/^Device: //p;}'); do
    section "mtu:$device" networksetup -listvalidMTUrange "$device"
  done
}

linux() {
  section version uname -r
  section memory grep MemTotal /proc/meminfo
  section chip sed -n '/^model name/{p;q;}' /proc/cpuinfo
  section model cat "$root/sys/class/dmi/id/product_name"
  bus=$root/sys/bus/thunderbolt/devices
  section bus test -d "$bus"
  section tree values "$bus"/*/unique_id "$bus"/*/device_name "$bus"/*/vendor_name "$bus"/*/generation \
    "$bus"/*/rx_speed "$bus"/*/tx_speed "$bus"/*/rx_lanes "$bus"/*/tx_lanes "$bus"/*/key
  names=
  for net in "$bus"/*/net/*; do
    if [ -e "$net" ]; then names="$names ${net#"$root"}"; fi
  done
  # shellcheck disable=SC2086 # a list of words
  section nets printf '%s\n' $names
  section module test -d "$root/sys/module/thunderbolt_net"
  section rdma-devices values "$root"/sys/class/infiniband/*/ports/1/state \
    "$root"/sys/class/infiniband/*/ports/1/gid_attrs/ndevs/0
  # Peers answer with their hardware addresses, which tell two cables of one controller apart.
  case $names in
    *' '*' '*)
      for net in $names; do
        ping -6 -c 2 -i 0.3 -w 1 -I "${net##*/}" ff02::1 >/dev/null 2>&1 &
      done
      wait ;;
  esac
  section interfaces ip -json -details address show
  section routes ip -json -4 route show table all
  section neighbours ip -json neigh show
  section managed nmcli -t -f DEVICE,STATE device
  section systemd test -d "$root/run/systemd/system"
  section ssh systemctl is-active ssh.service sshd.service
  section job systemctl is-enabled thunderhead-cables.service
  section job-folder test -d "$root/etc/thunderhead"
  section job-script cat "$root/etc/thunderhead/cables.sh"
  section job-unit cat "$root/etc/systemd/system/thunderhead-cables.service"
  section job-cables cat "$root/etc/thunderhead/cables"
}

section system uname -s
section name hostname
# The address by which ssh has come in: setup must not cut it.
section reached printf '%s\n' "${SSH_CONNECTION:-}"
case $(uname -s) in
  Darwin) macos ;;
  Linux) linux ;;
esac
printf '@@ end 0\n'
