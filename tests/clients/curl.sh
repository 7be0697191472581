#!/usr/bin/env bash
# Tests the server with curl. `with_servers.py` starts the servers, and compares the images that this script stores.
# shellcheck disable=SC2153 # with_servers.py sets the variables in capitals
set -euo pipefail

star='a large red star on a blue background'
shapes='a green heart on the left and a blue star on the right on a yellow background'
cd "$OUT"
failed=0
number=0

# Prints a result. The arguments are a name and a command that has to succeed.
check() {
    local name=$1
    shift
    if "$@"; then
        echo "curl: $name: ok"
    else
        echo "curl: $name: FAILED: $*"
        [ ! -s headers ] || sed 's/^/    /' headers
        [ ! -s body ] || { head -c 600 body | tr -cd '[:print:]\n' | sed 's/^/    /' && echo; }
        failed=$((failed + 1))
    fi
}

# Sends a request. The status is in $status, and files have headers and body.
send() {
    rm -f headers body
    local options=(--disable --silent --show-error --max-time 60 --dump-header headers --output body --write-out "%{http_code}")
    status=$(curl "${options[@]}" "$@") || status="$status, curl failed"
}

type=(-H 'Content-Type: application/json')

# Posts JSON to a route of the images API. The arguments are the route, the JSON and options of curl.
json() {
    printf '%s' "$2" >request
    send "${type[@]}" --data-binary @request "${@:3}" "$MAIN/v1/images/$1"
}

# The value of a header.
header() {
    tr -d '\r' <headers | sed -n "s/^$1: //Ip"
}

# Evaluates a Python expression about the JSON `body`.
holds() {
    python3 -c 'import json, sys
body = json.load(open("body"))
sys.exit(0 if eval(sys.argv[1]) else 1)' "$1"
}

# The status and the code of an error, and the field that it names.
error() {
    [ "$status" = "$1" ] && [ -n "$(header x-request-id)" ] &&
        holds "set(body['error']) == {'message', 'type', 'param', 'code'}" &&
        holds "(body['error']['code'], body['error']['param']) == ('$2', $3)"
}

# Keeps a file for the comparison with the command line. The arguments are the file and the members of the request.
keep() {
    number=$((number + 1))
    check "image $number" mv "$1" "$number"
    printf '{"file": "%s", %s}\n' "$number" "$2" >>requests.jsonl
}

# Stores image number $1 of the JSON `body`.
decode() {
    rm -f image
    python3 -c 'import base64, json, sys
data = json.load(open("body"))["data"][int(sys.argv[1])]
open("image", "wb").write(base64.b64decode(data["b64_json"], validate=True))' "$1" || true
}

for format in png jpeg webp; do
    json generations '{"prompt": "'"$star"'", "size": "96x64", "output_format": "'$format'", "seed": 7}'
    check "$format" [ "$status" = 200 ]
    check "$format: answer" holds "(body['data'][0]['seed'], body['output_format']) == (7, '$format')"
    check "$format: usage" holds "body['usage']['output_tokens'] > 0"
    decode 0
    keep image "\"prompt\": \"$star\", \"size\": \"96x64\", \"output_format\": \"$format\", \"seed\": 7"

    # The file itself, without JSON.
    json generations '{"prompt": "'"$star"'", "size": "96x64", "output_format": "'$format'", "seed": 7}' -H "Accept: image/$format"
    check "$format: file" [ "$status $(header content-type) $(header x-kiln-seed)" = "200 image/$format 7" ]
    keep body "\"prompt\": \"$star\", \"size\": \"96x64\", \"output_format\": \"$format\", \"seed\": 7"
done

json generations '{"prompt": "'"$star"'", "size": "96x64", "seed": 7, "response_format": "url"}'
send "$(python3 -c 'import json; print(json.load(open("body"))["data"][0]["url"])')"
check "url" [ "$status $(header content-type)" = "200 image/png" ]
keep body "\"prompt\": \"$star\", \"size\": \"96x64\", \"seed\": 7"

json generations '{"prompt": "'"$star"'", "size": "96x64", "n": 2, "seed": 11}'
check "two images" holds "[image['seed'] for image in body['data']] == [11, 12]"
for i in 0 1; do
    decode $i
    keep image "\"prompt\": \"$star\", \"size\": \"96x64\", \"seed\": $((11 + i))"
done

json generations '{"prompt": "'"$star"'", "size": "auto", "seed": 7, "unknown": 1}' -H 'X-Request-Id: my-request_1'
check "size of the model" holds "body['size'] == '256x256'"
check "request id" [ "$(header x-request-id)" = my-request_1 ]
check "unknown field" [ "$(header x-kiln-ignored)" = unknown ]
decode 0
keep image "\"prompt\": \"$star\", \"seed\": 7"

# The prompt comes last, an image is both `image` and `image[]`, and numbers are text.
send -F image=@"$IMAGES/scene.png" -F 'image[]'=@"$IMAGES/ring.jpg" -F image=@"$IMAGES/stripes.webp" \
    -F seed=3 -F size=64x80 -F prompt="$shapes" "$MAIN/v1/images/edits"
check "edit of three images" [ "$status" = 200 ]
check "edit of three images: answer" holds "body['data'][0]['seed'] == 3"
check "edit of three images: usage" holds "body['usage']['input_tokens_details']['image_tokens'] > 0"
decode 0
keep image "\"prompt\": \"$shapes\", \"size\": \"64x80\", \"seed\": 3, \"images\": [\"scene.png\", \"ring.jpg\", \"stripes.webp\"]"

send -H 'Transfer-Encoding: chunked' -F prompt="$shapes" -F seed=3 -F image=@"$IMAGES/scene.png" -F mask=@"$IMAGES/mask.png" \
    "$MAIN/v1/images/edits"
check "edit with mask" [ "$status" = 200 ]
decode 0
keep image "\"prompt\": \"$shapes\", \"seed\": 3, \"images\": [\"scene.png\"], \"mask\": \"mask.png\""

# JSON may have images as data URLs, on both routes.
for route in edits generations; do
    data=$(base64 -w 0 "$IMAGES/scene.png")
    json $route '{"prompt": "'"$shapes"'", "seed": 3, "images": [{"image_url": "data:image/png;base64,'"$data"'"}]}'
    check "images in JSON to $route" [ "$status" = 200 ]
    decode 0
    keep image "\"prompt\": \"$shapes\", \"seed\": 3, \"images\": [\"scene.png\"]"
done

# Stores the image of the last event of a stream, and checks the events before it.
events() {
    rm -f image
    python3 - "$@" <<'PYTHON'
import base64, json, sys
frames = [frame for frame in open("body").read().split("\n\n") if frame and not frame.startswith(":")]
kinds = []
for frame in frames:
    event, data = frame.split("\n")
    data = json.loads(data.removeprefix("data: "))
    assert event == "event: " + data["type"], event
    kinds.append(data["type"].split(".")[1])
assert kinds == sys.argv[1:], kinds
assert data["usage"]["total_tokens"] > 0
open("image", "wb").write(base64.b64decode(data["b64_json"], validate=True))
PYTHON
}

json generations '{"prompt": "'"$star"'", "size": "96x64", "seed": 7, "stream": true, "partial_images": 3}'
check "stream: headers" [ "$status $(header content-type | cut -d ';' -f 1) $(header cache-control)" = "200 text/event-stream no-store" ]
check "stream" events partial_image partial_image partial_image completed
keep image "\"prompt\": \"$star\", \"size\": \"96x64\", \"seed\": 7"

send -F prompt="$shapes" -F seed=3 -F stream=true -F partial_images=1 -F image=@"$IMAGES/scene.png" "$MAIN/v1/images/edits"
check "stream of an edit" events partial_image completed
keep image "\"prompt\": \"$shapes\", \"seed\": 3, \"images\": [\"scene.png\"]"

json generations '{"prompt": "x", "size": "100x64"}'
check "size" error 400 invalid_value "'size'"
json generations '{"prompt": '
check "broken JSON" error 400 invalid_json None
json generations '{"size": "96x64"}'
check "no prompt" error 400 invalid_value "'prompt'"
json generations '{"prompt": "x", "model": "other"}'
check "unknown model" error 404 model_not_found "'model'"
echo "This is no image." >text
send -F prompt=x -F image=@text "$MAIN/v1/images/edits"
check "no image" error 400 invalid_image "'image[0]'"
send -F prompt=x "$MAIN/v1/images/edits"
check "edit without an image" error 400 invalid_value "'image'"
send -F prompt=x "$MAIN/v1/images/generations"
check "form to a route of JSON" error 415 unsupported_media_type None
send -H 'Content-Type: text/plain' -d '{"prompt": "x"}' "$MAIN/v1/images/generations"
check "JSON as text" error 415 unsupported_media_type None
send "$MAIN/v1/images/generations"
check "wrong method" error 405 method_not_allowed None
send "$MAIN/v1/nothing"
check "unknown route" error 404 not_found None
send -H 'Host: example.com' "$MAIN/v1/models"
check "host of another machine" error 403 host_not_allowed None
json generations '{"prompt": "x"}' -H 'Origin: http://example.com'
check "page of another site" error 403 origin_not_allowed None
check "no CORS for it" [ -z "$(header access-control-allow-origin)" ]
head -c 70000000 /dev/zero >large
send -H 'Content-Type: application/json' --data-binary @large "$MAIN/v1/images/generations"
check "large body" error 413 body_too_large None
rm large
send "$MAIN/health"
check "health" [ "$status" = 200 ]

send "$BUSY/v1/models"
check "no key" error 401 invalid_api_key None
check "no key: challenge" [ "$(header www-authenticate | cut -d ' ' -f 1)" = Bearer ]
send -H "Authorization: Bearer $KEY" "$BUSY/v1/models"
check "key" [ "$status" = 200 ]
send "$BUSY/ready"
check "ready without a key" [ "$status" = 200 ]

# Waits until an image is made and this many images wait.
queue_has() {
    for _ in $(seq 500); do
        send -H "Authorization: Bearer $KEY" "$BUSY/kiln/status"
        queue=$(grep -o '"queue":{[^}]*}' body)
        [[ $queue != *'"waiting":'$1[,}]* || $queue != *'"predicted_ms":'[1-9]* ]] || return 0
        sleep 0.02
    done
    return 1
}

# One image runs and one waits, so the third request is refused. curl waits as long as Retry-After says.
authorized=(--silent --max-time 60 "${type[@]}" -H "Authorization: Bearer $KEY" "$BUSY/v1/images/generations")
curl --disable "${authorized[@]}" -d '{"prompt": "'"$star"'", "seed": 7, "steps": 16}' --output first &
check "running image" queue_has 0
curl --disable "${authorized[@]}" -d '{"prompt": "'"$star"'", "size": "64x64", "seed": 8}' --output second &
check "waiting image" queue_has 1
send "${authorized[@]}" -d '{"prompt": "'"$star"'", "size": "64x64", "seed": 9}'
check "full queue" error 429 queue_full None
check "full queue: Retry-After" [ "$(header retry-after)" -ge 1 ]
send "${authorized[@]}" -d '{"prompt": "'"$star"'", "size": "64x64", "seed": 7}' --retry 20
check "retry" [ "$status" = 200 ]
check "retry after a refusal" grep -q ' 429' headers
decode 0
keep image "\"prompt\": \"$star\", \"size\": \"64x64\", \"seed\": 7"
wait
mv first body; decode 0
keep image "\"prompt\": \"$star\", \"seed\": 7, \"steps\": 16"
mv second body; decode 0
keep image "\"prompt\": \"$star\", \"size\": \"64x64\", \"seed\": 8"

[ $failed = 0 ]
