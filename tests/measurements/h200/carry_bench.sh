#!/bin/bash
# Folders of at most 60 MiB for the GPU machine, one a call: the packed Python, packages for the machine's own Python,
# and this checkout.
# usage: carry_bench.sh PARTS SITE DEST    SITE: folder with site.tar.xz.00 … and graphs.tar.00 … (README.md says of what)
set -euo pipefail
parts=$1; site=$2; dest=$3
here=$(cd "$(dirname "$0")/../../.." && pwd)
rm -rf "$dest"/c[0-9][0-9]; mkdir -p "$dest"
n=0
for file in "$parts"/p??/gpu.tar.xz.* "$site"/site.tar.xz.* "$site"/graphs.tar.*; do
  folder=$dest/c$(printf %02d $n); mkdir -p "$folder"; cp "$file" "$folder/"; n=$((n + 1))
done
for script in "$parts"/p??/unpack.sh; do cp -f "$script" "$folder/"; done  # in every folder, or in the last
tar -C "$here" -c --exclude=__pycache__ builders clients tests/__init__.py tests/measurements tests/tools deploy*.yaml |
  xz -1 > "$folder/code.tar.xz"
cat > "$folder/setup.sh" <<'END'
#!/bin/bash
# usage: setup.sh FOLDER_WITH_ALL_FILES TARGET: the packed Python, the packages and the code below TARGET
set -euo pipefail
from=$1; to=$2; mkdir -p "$to/code"
unpack() { python3 -c 'import lzma,sys,tarfile; tarfile.open(fileobj=lzma.open(sys.stdin.buffer), mode="r|").extractall(sys.argv[1])' "$1"; }
bash "$from/unpack.sh" "$from" "$to/python" & python=$!
cat "$from"/site.tar.xz.?? | unpack "$to"
cat "$from"/graphs.tar.?? | tar -C "$to" -x
tar -C "$to/code" -xJf "$from/code.tar.xz"
wait $python
END
du -sh "$dest"/c??
