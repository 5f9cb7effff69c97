# ruff: noqa
"""HTTP probes of an OpenAI/vLLM server. Record a real server's answers, or compare another server's shape with a recording.

record:  probes.py record BASE_URL OUT.json [--full]
compare: probes.py compare BASE_URL RECORDING.json      (prints each probe whose status, error identity or JSON shape differs)
"""
import http.client, json, sys, urllib.parse
C, CH, T, D = "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"
U = [{"role": "user", "content": "hello there"}]
M = "mymodel"
P = [  # name, method, path, body, headers
 ("health", "GET", "/health", None, {}), ("ping", "GET", "/ping", None, {}), ("version", "GET", "/version", None, {}), ("models", "GET", "/v1/models", None, {}), ("load", "GET", "/load", None, {}),
 ("unknown route", "GET", "/nope", None, {}), ("wrong method", "GET", C, None, {}),
 ("completion", "POST", C, {"model": M, "prompt": "hello world", "max_tokens": 4, "ignore_eos": True}, {}),
 ("completion default max_tokens", "POST", C, {"prompt": "hello world", "ignore_eos": True}, {}),
 ("completion ids", "POST", C, {"model": M, "prompt": [5, 6, 7, 8] * 8, "max_tokens": 3, "ignore_eos": True}, {}),
 ("completion list of ids", "POST", C, {"model": M, "prompt": [[5, 6, 7], [8, 9, 10, 11]], "max_tokens": 2, "ignore_eos": True}, {}),
 ("completion list of strings", "POST", C, {"model": M, "prompt": ["a b", "c d e"], "max_tokens": 2, "ignore_eos": True}, {}),
 ("completion n", "POST", C, {"model": M, "prompt": "hi", "max_tokens": 2, "n": 2, "temperature": 1.0, "ignore_eos": True}, {}),
 ("completion alias", "POST", C, {"model": "alias2", "prompt": "hi", "max_tokens": 1}, {}),
 ("completion request id", "POST", C, {"model": M, "prompt": "hi", "max_tokens": 1}, {"X-Request-Id": "abc-123"}),
 ("completion repeat for cache 1", "POST", C, {"model": M, "prompt": [11, 12, 13, 14] * 16, "max_tokens": 2, "ignore_eos": True}, {}),
 ("completion repeat for cache 2", "POST", C, {"model": M, "prompt": [11, 12, 13, 14] * 16, "max_tokens": 2, "ignore_eos": True}, {}),
 ("completion return ids", "POST", C, {"model": M, "prompt": "hello", "max_tokens": 2, "return_token_ids": True, "ignore_eos": True}, {}),
 ("completion echo", "POST", C, {"model": M, "prompt": "hello", "max_tokens": 2, "echo": True, "ignore_eos": True}, {}),
 ("completion stream", "POST", C, {"model": M, "prompt": "hello", "max_tokens": 4, "stream": True, "ignore_eos": True}, {}),
 ("completion stream usage", "POST", C, {"model": M, "prompt": "hello", "max_tokens": 3, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}, {}),
 ("completion stream continuous usage", "POST", C, {"model": M, "prompt": "hello", "max_tokens": 3, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {}),
 ("completion stream one token", "POST", C, {"model": M, "prompt": "hello", "max_tokens": 1, "stream": True}, {}),
 ("completion stream two prompts", "POST", C, {"model": M, "prompt": ["a b", "c d"], "max_tokens": 2, "stream": True, "ignore_eos": True}, {}),
 ("chat", "POST", CH, {"model": M, "messages": U, "max_tokens": 4, "ignore_eos": True}, {}),
 ("chat max_completion_tokens", "POST", CH, {"model": M, "messages": U, "max_tokens": 9, "max_completion_tokens": 2, "ignore_eos": True}, {}),
 ("chat system and turns", "POST", CH, {"model": M, "messages": [{"role": "system", "content": "be kind"}, *U, {"role": "assistant", "content": "ok"}, {"role": "user", "content": "go on"}], "max_tokens": 2, "ignore_eos": True}, {}),
 ("chat content parts", "POST", CH, {"model": M, "messages": [{"role": "user", "content": [{"type": "text", "text": "hello"}, {"type": "text", "text": "there"}]}], "max_tokens": 2, "ignore_eos": True}, {}),
 ("chat stream", "POST", CH, {"model": M, "messages": U, "max_tokens": 4, "stream": True, "ignore_eos": True}, {}),
 ("chat stream usage", "POST", CH, {"model": M, "messages": U, "max_tokens": 3, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True}}, {}),
 ("chat stream continuous usage", "POST", CH, {"model": M, "messages": U, "max_tokens": 3, "stream": True, "ignore_eos": True, "stream_options": {"include_usage": True, "continuous_usage_stats": True}}, {}),
 ("chat stream return ids", "POST", CH, {"model": M, "messages": U, "max_tokens": 2, "stream": True, "ignore_eos": True, "return_token_ids": True}, {}),
 ("tokenize prompt", "POST", T, {"model": M, "prompt": "hello world"}, {}), ("tokenize no special", "POST", T, {"prompt": "hello world", "add_special_tokens": False}, {}),
 ("tokenize strs", "POST", T, {"prompt": "hello", "return_token_strs": True}, {}), ("tokenize messages", "POST", T, {"messages": U}, {}),
 ("tokenize list", "POST", T, {"prompt": ["a"]}, {}), ("tokenize unknown model", "POST", T, {"model": "nope", "prompt": "x"}, {}), ("tokenize empty", "POST", T, {"prompt": ""}, {}),
 ("detokenize", "POST", D, {"model": M, "tokens": [5, 6, 7]}, {}), ("detokenize negative", "POST", D, {"tokens": [-1]}, {}),
 ("render completion", "POST", C + "/render", {"model": M, "prompt": "hello", "max_tokens": 4}, {}), ("render chat", "POST", CH + "/render", {"model": M, "messages": U, "max_tokens": 4}, {}),
 ("kv event sources", "GET", "/kv_event_sources", None, {}), ("server info", "GET", "/server_info", None, {}), ("is sleeping", "GET", "/is_sleeping", None, {}), ("is paused", "GET", "/is_paused", None, {}),
 ("reset prefix cache", "POST", "/reset_prefix_cache", None, {}),
 ("unknown model", "POST", C, {"model": "nope", "prompt": "x"}, {}), ("unknown model stream", "POST", C, {"model": "nope", "prompt": "x", "stream": True}, {}), ("unknown model chat", "POST", CH, {"model": "nope", "messages": U}, {}),
 ("sum over length", "POST", C, {"prompt": [5] * 200, "max_tokens": 100, "ignore_eos": True}, {}), ("prompt too long", "POST", C, {"prompt": [5] * 300, "max_tokens": 1}, {}),
 ("prompt equals length", "POST", C, {"prompt": [5] * 256, "max_tokens": 1}, {}), ("prompt length minus one", "POST", C, {"prompt": [5] * 255, "max_tokens": 1}, {}),
 ("text too long", "POST", C, {"prompt": "hello world " * 300, "max_tokens": 1}, {}), ("max_tokens over length", "POST", C, {"prompt": "hello", "max_tokens": 1000}, {}),
 ("chat too long", "POST", CH, {"messages": [{"role": "user", "content": "hello " * 300}]}, {}), ("chat max_tokens over", "POST", CH, {"messages": U, "max_tokens": 1000}, {}),
 ("chat max_completion over", "POST", CH, {"messages": U, "max_completion_tokens": 1000}, {}), ("stream too long", "POST", C, {"prompt": [5] * 300, "max_tokens": 1, "stream": True}, {}),
 ("bad json", "POST", C, '{"prompt": "x", ', {}), ("bad content type", "POST", C, '{"prompt":"x"}', {"Content-Type": "text/plain"}), ("no body", "POST", C, "", {}), ("body is list", "POST", C, [1, 2], {}),
 ("max_tokens string", "POST", C, {"prompt": "x", "max_tokens": "abc"}, {}), ("prompt int", "POST", C, {"prompt": 5, "max_tokens": 1}, {}), ("messages string", "POST", CH, {"messages": "hi"}, {}),
 ("messages missing", "POST", CH, {"model": M}, {}), ("messages empty", "POST", CH, {"messages": [], "max_tokens": 1}, {}), ("prompt empty", "POST", C, {"prompt": "", "max_tokens": 1}, {}),
 ("prompt missing", "POST", C, {"max_tokens": 1}, {}), ("prompt empty list", "POST", C, {"prompt": [], "max_tokens": 1}, {}), ("prompt nested empty", "POST", C, {"prompt": [[]], "max_tokens": 1}, {}),
 ("max_tokens negative", "POST", C, {"prompt": "x", "max_tokens": -1}, {}), ("max_tokens zero", "POST", C, {"prompt": "x", "max_tokens": 0}, {}), ("chat max_tokens negative", "POST", CH, {"messages": U, "max_tokens": -5}, {}),
 ("n zero", "POST", C, {"prompt": "x", "max_tokens": 1, "n": 0}, {}), ("n two greedy", "POST", C, {"prompt": "x", "max_tokens": 1, "n": 2, "temperature": 0}, {}), ("temperature negative", "POST", C, {"prompt": "x", "max_tokens": 1, "temperature": -1}, {}),
 ("id over vocab", "POST", C, {"prompt": [5, 99999], "max_tokens": 1}, {}), ("id negative", "POST", C, {"prompt": [5, -1], "max_tokens": 1}, {}), ("stream_options alone", "POST", C, {"prompt": "x", "max_tokens": 1, "stream_options": {"include_usage": True}}, {}),
 ("min over max", "POST", C, {"prompt": "x", "max_tokens": 1, "min_tokens": 5}, {}), ("priority", "POST", C, {"prompt": "x", "max_tokens": 1, "priority": 5}, {}),
 ("salt empty", "POST", C, {"prompt": "x", "max_tokens": 1, "cache_salt": ""}, {}), ("salt bad", "POST", C, {"prompt": "x", "max_tokens": 1, "cache_salt": "a/b"}, {}), ("salt ok", "POST", C, {"prompt": "x", "max_tokens": 1, "cache_salt": "ab"}, {}),
 ("unknown field", "POST", C, {"prompt": "x", "max_tokens": 1, "foo": 1}, {}), ("stream_interval zero", "POST", C, {"prompt": "x", "max_tokens": 1, "stream_interval": 0}, {}),
 ("stream_interval two", "POST", C, {"prompt": "x", "max_tokens": 5, "stream": True, "stream_interval": 2, "ignore_eos": True}, {}), ("dp rank out of range", "POST", C, {"prompt": "x", "max_tokens": 1}, {"X-data-parallel-rank": "3"}),
 ("role unknown", "POST", CH, {"messages": [{"role": "robot", "content": "x"}], "max_tokens": 1}, {}), ("content null", "POST", CH, {"messages": [{"role": "user", "content": None}], "max_tokens": 1}, {}),
]

def ask(base, method, path, body, headers):
    u = urllib.parse.urlsplit(base)
    c = http.client.HTTPConnection(u.hostname, u.port, timeout=20)
    h = dict(headers)
    data = None
    if body is not None:
        data = body if isinstance(body, str) else json.dumps(body)
        h.setdefault("Content-Type", "application/json")
    c.request(method, path, data, h)
    r = c.getresponse(); raw = r.read().decode("utf-8", "replace"); c.close()
    ct = r.getheader("content-type")
    out = {"status": r.status, "content_type": ct, "x_request_id": r.getheader("x-request-id")}
    if ct and ct.startswith("text/event-stream"):
        ev = [e[6:] if e.startswith("data: ") else e for e in raw.split("\n\n") if e]
        out["events"] = [json.loads(e) if e.startswith("{") else e for e in ev]
    else:
        try: out["json"] = json.loads(raw)
        except ValueError: out["text"] = raw
    return out

def record(base):
    return [{"name": n, "method": m, "path": p, "body": b, "headers": h, "answer": ask(base, m, p, b, h)} for n, m, p, b, h in P]

def shape(x):
    if isinstance(x, dict): return {k: shape(v) for k, v in x.items()}
    if isinstance(x, list): return [shape(v) for v in x[:1]] if x and all(not isinstance(v, (dict, list)) for v in x) else [shape(v) for v in x]
    if isinstance(x, bool): return "bool"
    if x is None: return "null"
    return "num" if isinstance(x, (int, float)) else "str"

FIXED = {"object", "finish_reason", "stop_reason", "role", "type", "param", "code", "owned_by", "index", "prompt_tokens", "completion_tokens", "total_tokens", "max_model_len", "status", "detail", "cached_tokens", "count"}
def fixed(x, k=None):
    if isinstance(x, dict): return {a: fixed(v, a) for a, v in x.items()}
    if isinstance(x, list): return [fixed(v, k) for v in x]
    return x if k in FIXED else None

def compare(base, rec):
    bad = 0
    for r in rec:
        if r["name"] in ("server info",): continue
        try: got = ask(base, r["method"], r["path"], r["body"], r["headers"])
        except Exception as e: got = {"status": repr(e)}
        want, diffs = r["answer"], []
        if got.get("status") != want["status"]: diffs.append(f"status {got.get('status')} want {want['status']}")
        if (got.get("content_type") or "").split(";")[0] != (want["content_type"] or "").split(";")[0]: diffs.append(f"content-type {got.get('content_type')} want {want['content_type']}")
        for part in ("json", "events"):
            if part in want:
                g = got.get(part)
                if shape(g) != shape(want[part]): diffs.append(f"{part} shape\n    got  {json.dumps(shape(g))[:700]}\n    want {json.dumps(shape(want[part]))[:700]}")
                elif fixed(g) != fixed(want[part]): diffs.append(f"{part} values\n    got  {json.dumps(g)[:500]}\n    want {json.dumps(want[part])[:500]}")
                elif part == "json" and isinstance(g, dict) and list(g) != list(want[part]): diffs.append("key order")
        if diffs:
            bad += 1; print(f"- {r['name']}: " + "; ".join(diffs))
    print(f"{len(rec) - bad}/{len(rec)} probes alike")
    return bad

if __name__ == "__main__":
    if sys.argv[1] == "record": json.dump(record(sys.argv[2]), open(sys.argv[3], "w"), indent=1)
    else: sys.exit(1 if compare(sys.argv[2], json.load(open(sys.argv[3]))) else 0)
