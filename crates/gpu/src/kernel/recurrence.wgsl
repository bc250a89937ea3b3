$INPUTS$BINDINGS
var<workgroup> query: array<f32, 512>;
var<workgroup> key: array<f32, 512>;
$MEMORY
// A thread's sums over its rows: Sᵀ key, Sᵀ query, query · query, key · key; and query · key.
var<workgroup> sums: array<vec4<f32>, 256>;
var<workgroup> dots: array<f32, 256>;

@compute @workgroup_size(256)
fn main(@builtin(workgroup_id) id: vec3<u32>, @builtin(local_invocation_index) thread: u32) {
$PLACE    $ROWS
        let query_at = source + args.query_first + key_head * args.key_dim;
        let key_at = source + args.key_first + key_head * args.key_dim;
        let gate = $FIRST_GATE + head;
        for (var k = thread; k < args.key_dim; k += 256u) {
            query[k] = x_of($AGAINquery_at + k);
            key[k] = x_of($AGAINkey_at + k);
            $DECAYS
        }
        $TOKEN
        workgroupBarrier();
        let old = select(states, old_states, $IS_FIRST);
        var all = vec4<f32>(0.0);
        var both = 0.0;
        for (var k = part; k < args.key_dim; k += 8u) {
            let decayed = select(state_of($COPYold + k * args.value_dim) * $KEEP, 0.0, fresh);
            all = fma(vec4<f32>(decayed, decayed, query[k], key[k]), vec4<f32>(key[k], query[k], query[k], key[k]), all);
            both = fma(query[k], key[k], both);
        }
        sums[thread] = all;
        dots[thread] = both;
        workgroupBarrier();
        all = vec4<f32>(0.0);
        both = 0.0;
        for (var i = 0u; i < 8u; i++) {
            all += sums[i * 32u + line];
            both += dots[i * 32u + line];
        }
        let value = x_of($AGAINsource + args.value_first + head * args.value_dim + v);
        $WRITTEN
        if (column < args.value_dim) {
            for (var k = part; k < args.key_dim; k += 8u) {
                let s = states + k * args.value_dim;
                let next = fma(key[k], written, select(state_of($COPYold + k * args.value_dim) * $KEEP, 0.0, fresh));
                $STORE
            }
            if (part == 0u$AND_OUT) { out[row * args.out_stride + head * args.value_dim + v] = result; }
        }
        workgroupBarrier();
    }
}
