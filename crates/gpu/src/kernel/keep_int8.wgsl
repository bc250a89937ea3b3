    // The largest magnitude, by its bits: a NaN is larger than all numbers, and stays in the scale.
    var largest = 0u;
    for (var i = thread; i < width; i += 64u) {
        largest = max(largest, bitcast<u32>($VALUE[i]) & 0x7fffffffu);
    }
    most[thread] = largest;
    workgroupBarrier();
    for (var half = 32u; half > 0u; half /= 2u) {
        if (thread < half) { most[thread] = max(most[thread], most[thread + half]); }
        workgroupBarrier();
    }
    let limit = bitcast<f32>(most[0]);
    let inverse = select(0.0, 127.0 / limit, most[0] > 0u);
    if (thread == 0u) {
        let scale = limit / 127.0;
        $KEEP_SCALE
    }
    for (var i = thread; i < words; i += 64u) {
        var four = vec4<f32>(0.0);
        for (var j = 0u; j < 4u; j++) {
            if (4u * i + j < width) { four[j] = $VALUE[4u * i + j]; }
        }
        let word = pack4xI8(vec4<i32>(round(four * inverse)));
        $KEEP_WORD
    }
