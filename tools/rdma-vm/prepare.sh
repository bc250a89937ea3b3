# Sourced by `run`: installs QEMU from Debian, and puts a kernel and an initramfs of its modules and
# init.sh into $cache.

# Every module that the guest loads; their dependencies are added.
modules=(virtio_pci virtio_console 9p 9pnet_virtio overlay veth bridge sch_netem crc32_generic rdma_rxe ib_uverbs)
packages=(qemu-system-x86 busybox-static cpio kmod iproute2 rdma-core ibverbs-providers ibverbs-utils procps util-linux)

prepare() {
  local stamp; stamp=$(cat "$here/prepare.sh" "$here/init.sh" | cksum)
  [[ -s $cache/vmlinuz && $(cat "$cache/stamp" 2>/dev/null) = "$stamp" ]] && have_programs && return
  command -v apt-get >/dev/null || fail "it needs Debian's packages: run it on a Debian or Ubuntu machine"
  ((EUID == 0)) || fail "'$0 --prepare' must be run as root once, to install ${packages[*]}"
  mkdir -p "$cache"
  # Two callers at once: the second waits, then finds the work done.
  exec 9>"$cache/lock"; flock 9
  if [[ $(cat "$cache/stamp" 2>/dev/null) != "$stamp" ]] || ! have_programs; then
    { install_packages && build_initrd && echo "$stamp" >"$cache/stamp"; } >"$cache/log" 2>&1 ||
      { tail -n 25 "$cache/log" >&2; fail "could not prepare the machine, the log is $cache/log"; }
  fi
  exec 9>&-
}

have_programs() {
  command -v qemu-system-x86_64 >/dev/null && command -v rdma >/dev/null && dpkg -s ibverbs-providers >/dev/null 2>&1
}

install_packages() {
  apt-get update -q || return
  DEBIAN_FRONTEND=noninteractive apt-get -o DPkg::Lock::Timeout=300 install -q -y --no-install-recommends "${packages[@]}"
}

# The kernel package is unpacked, never installed: this machine's boot is not touched.
build_initrd() (
  set -e
  package=$(apt-cache depends linux-image-amd64 | awk '$1 == "Depends:" && $2 ~ /^linux-image/ {print $2; exit}')
  version=${package#linux-image-}
  work=$(mktemp -d "$cache/build.XXXXXX"); trap 'rm -rf "$work"' EXIT
  cd "$work"
  apt-get -q -o APT::Sandbox::User=root download "$package"
  dpkg-deb -x ./*.deb kernel
  depmod -b kernel "$version"
  mkdir -p root/bin root/modules
  cp /bin/busybox root/bin/
  for module in "${modules[@]}"; do modprobe -d kernel -S "$version" --show-depends "$module"; done |
    awk '$1 == "insmod" && !seen[$2]++ {print $2}' >order
  while read -r file; do cp "$file" root/modules/; basename "$file" >>root/modules/order; done <order
  install -m 755 "$here/init.sh" root/init
  (cd root && find . | cpio -o -H newc --quiet) | gzip -1 >"$cache/initrd.new"
  cp "kernel/boot/vmlinuz-$version" "$cache/vmlinuz"
  mv "$cache/initrd.new" "$cache/initrd"
)
