#!/bin/bash
# Folders of at most 60 MiB for the GPU machine, one a call: the packed Python, this checkout's code, what was prepared.
# usage: carry.sh PARTS PREPARED DEST [folder with libcupti.so.13 of the driver's CUDA version]
set -euo pipefail
parts=$1; prepared=$2; dest=$3; cupti=${4:-}
here=$(cd "$(dirname "$0")/../../.." && pwd)
rm -rf "$dest"/c[0-9][0-9]; mkdir -p "$dest"
n=0
for part in "$parts"/p??; do
  folder=$dest/c$(printf %02d $n); mkdir -p "$folder"; cp "$part"/* "$folder/"; chmod u+w "$folder"/*; n=$((n + 1))
done
# The last part is the shortest: what was prepared goes with it, without the graph that needs a folder of its own.
tar -C "$prepared" -c --exclude=./graphs/minilm.onnx . | xz -T0 -1 > "$folder/prepared.tar.xz"
tar -C "$here" -c --exclude=__pycache__ builders tests/__init__.py tests/measurements tests/tools | xz -1 > "$folder/code.tar.xz"
folder=$dest/c$(printf %02d $n); mkdir -p "$folder"
cp "$prepared/graphs/minilm.onnx" "$folder/"
if [ -n "$cupti" ]; then cp "$cupti/libcupti.so.13" "$folder/"; fi
cat > "$folder/setup.sh" <<'END'
#!/bin/bash
# usage: setup.sh FOLDER_WITH_ALL_FILES TARGET: unpacks Python, code and what was prepared below TARGET
set -euo pipefail
from=$1; to=$2; mkdir -p "$to/prepared/graphs" "$to/code"
bash "$from/unpack.sh" "$from" "$to/python" & python=$!
tar -C "$to/prepared" -xJf "$from/prepared.tar.xz"; tar -C "$to/code" -xJf "$from/code.tar.xz"
cp "$from/minilm.onnx" "$to/prepared/graphs/"
wait $python
if [ -f "$from/libcupti.so.13" ]; then cp "$from/libcupti.so.13" "$to/python/site/nvidia/cu13/lib/"; fi
END
du -sh "$dest"/c??
