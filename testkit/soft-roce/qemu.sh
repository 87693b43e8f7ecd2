# Sourced by `run`: the way through QEMU without KVM, with the distribution's kernel. Ten times slower than UML.

qemu_modules=(crc32_generic crc32-pclmul virtio_mmio virtio_console 9pnet_virtio 9p overlay rdma_ucm ib_uverbs rdma_rxe veth
  sch_netem sch_tbf)

# QEMU boots an unpacked kernel.
uncompress_kernel() { # uncompress_kernel BZIMAGE FILE
  local kind offset
  for kind in '\x28\xb5\x2f\xfd zstd' '\xfd7zXZ\x00 xz'; do
    for offset in $(LC_ALL=C grep -abo -P "${kind% *}" "$1" | cut -d: -f1); do
      tail -c +$((offset + 1)) "$1" | ${kind#* } -dcq >"$2" 2>/dev/null || true # more follows it
      [ "$(head -c 4 "$2" | tail -c 3)" != ELF ] || return 0
    done
  done
  failed "cannot unpack $1"
}

qemu_init() {
  cat <<'GUEST'
#!/bin/busybox sh
b=/bin/busybox
$b mkdir -p /proc /sys /dev /lower /run
for m in $($b cat /modules/order); do $b insmod /modules/$m || echo "insmod $m failed"; done
$b mount -t proc proc /proc; $b mount -t sysfs sysfs /sys; $b mount -t devtmpfs dev /dev; $b mount -t tmpfs run /run
nine() { $b mkdir -p "$2"; $b mount -t 9p -o trans=virtio,version=9p2000.L,msize=512000,$3 "$1" "$2"; }
nine host /lower ro,cache=loose
$b mkdir /control; nine control /control cache=none
. /control/init
GUEST
}

# The initramfs: busybox, the modules that the devices need, in order, and init.
qemu_initramfs() { # qemu_initramfs TREE VERSION FILE
  local root=$1.initramfs file name module
  rm -rf "$root"; mkdir -p "$root/bin" "$root/modules"
  cp "$(command -v busybox)" "$root/bin/busybox"
  depmod -b "$1" "$2"
  for module in "${qemu_modules[@]}"; do
    modprobe -d "$1" -S "$2" --show-depends "$module" || failed "$2 has no module $module"
  done | awk '$1 == "insmod" && !seen[$2]++ { print $2 }' | while read -r file; do
    name=$(basename "$file" .xz)
    case $file in *.xz) xz -dc "$file" ;; *) cat "$file" ;; esac >"$root/modules/$name"
    echo "$name" >>"$root/modules/order"
  done
  qemu_init >"$root/init"; chmod +x "$root/init"
  (cd "$root" && find . | cpio -o -H newc --quiet) >"$3.new"
  mv "$3.new" "$3"; rm -r "$root"
}

run_qemu() {
  local package version tree kernel number=0 dir khz nines
  [ "$(uname -m)" = x86_64 ] || impossible "the recipe for QEMU is for x86_64"
  [ $siw = 0 ] || impossible "the distribution's kernel has no siw; use --uml"
  tools
  need qemu-system-x86_64=qemu-system-x86 busybox=busybox-static cpio modprobe=kmod xz=xz-utils zstd flock=util-linux
  package=$(apt-cache depends linux-image-amd64 2>/dev/null | awk '/Depends: linux-image/{print $2; exit}')
  [ -n "$package" ] || impossible "apt knows no linux-image-amd64; run: apt-get update"
  version=${package#linux-image-}
  tree=$cache/qemu-$version-$(cat "$here/qemu.sh" | sha256sum | cut -c 1-16) kernel=$tree.kernel
  mkdir -p "$cache" || impossible "cannot make $cache"
  exec 9>"$kernel.lock"; flock 9
  if [ ! -e "$kernel" ]; then
    rm -rf "$tree"; mkdir -p "$tree/download"
    (cd "$tree/download" && apt-get -qq -o APT::Sandbox::User=root download "$package") >&2 || impossible "could not download $package"
    dpkg-deb -x "$tree"/download/*.deb "$tree"
    qemu_initramfs "$tree" "$version" "$tree.initrd"
    uncompress_kernel "$tree/boot/vmlinuz-$version" "$kernel.new"
    mv "$kernel.new" "$kernel"; rm -rf "$tree"
  fi
  exec 9>&-

  command_file qemu "$@" >"$control/command"
  { echo 'lower=/lower'
    # The initramfs has one program; what follows names them as the host does.
    echo 'for p in mkdir mount chroot; do eval "$p() { $b $p \"\$@\"; }"; done'
    overlay_root
    echo 'mkdir -p control; mount --bind /control control'
    for dir in "${shares[@]}"; do printf 'nine share%d ./%q cache=none\n' $number "$dir"; number=$((number + 1)); done
    echo 'n=0; until set -- /dev/vport*p2; [ -c "$1" ] || [ $n = 200 ]; do $b sleep 0.05; n=$((n+1)); done'
    echo 'chroot . /bin/bash /control/command </dev/null >${1%2}1 2>$1'
    echo 'echo $? >/control/status'
    echo '$b poweroff -f'
  } >"$control/init"
  nine() { printf -- '-fsdev local,id=%s,path=%s,security_model=none,multidevs=remap%s -device virtio-9p-device,fsdev=%s,mount_tag=%s ' "$1" "$2" "$3" "$1" "$1"; }
  nines="$(nine host / ,readonly=on)$(nine control "$control" '')"
  number=0
  for dir in "${shares[@]}"; do nines+=$(nine share$number "$dir" '')" "; number=$((number + 1)); done
  # This board has no reference clock to check the TSC by: say its rate and trust it.
  khz=$(awk '/^cpu MHz/ { printf "%d", $4 * 1000; exit }' /proc/cpuinfo)
  # shellcheck disable=SC2086
  timed qemu-system-x86_64 -accel tcg,thread=multi -machine microvm -cpu max,-la57 -smp 2 -m "$mem" -nodefaults \
    -no-user-config -display none -no-reboot -kernel "$kernel" -initrd "$tree.initrd" -serial "file:$control/console" \
    -append "console=ttyS0 quiet panic=-1 reboot=t mitigations=off nokaslr tsc=reliable tsc_early_khz=$khz" \
    $nines -device virtio-serial-device \
    -add-fd fd=3,set=1 -chardev file,id=out,path=/dev/fdset/1,append=on -device virtserialport,chardev=out \
    -add-fd fd=4,set=2 -chardev file,id=err,path=/dev/fdset/2,append=on -device virtserialport,chardev=err \
    3>&1 4>&2
  ended
}
