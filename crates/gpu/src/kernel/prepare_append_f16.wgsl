    for (var i = thread; i < words; i += 64u) {
        let second = select(0.0, head[2u * i + 1u], 2u * i + 1u < width);
        let word = pack2x16float(vec2<f32>(head[2u * i], second));
        if (is_value) { values[vector * words + i] = word; } else { keys[vector * words + i] = word; }
    }
