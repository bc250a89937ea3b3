        $ZERO
        $SCORES
        $PARTS
        workgroupBarrier();
        var four = vec4<f32>(0.0);
        for (var part = 0u; part < 4u; part++) { four += tile[(part * 32u + mine) * 8u + column]; }
        $MASK
        maxima[thread] = max(max(four.x, four.y), max(four.z, four.w));
        workgroupBarrier();
        var best = most;
        for (var i = 0u; i < 8u; i++) { best = max(best, maxima[mine * 8u + i]); }
        let shrink = select(exp(most - best), 1.0, most == best);
        most = best;
        let weight = select(vec4<f32>(0.0), exp(four - best), four > vec4<f32>(NONE));
        weights[mine * WEIGHTS + column] = weight;
        sums[thread] = (weight.x + weight.y) + (weight.z + weight.w);
        if (column == 0u) { factors[mine] = shrink; }
        $SHARE
        workgroupBarrier();
        var sum = 0.0;
        for (var i = 0u; i < 8u; i++) { sum += sums[mine * 8u + i]; }
        total = fma(total, shrink, sum);
        $ADD
