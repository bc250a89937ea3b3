    for (var i = thread; i < words; i += 64u) {
        let second = select(0.0, $VALUE[2u * i + 1u], 2u * i + 1u < width);
        let word = pack2x16float(vec2<f32>($VALUE[2u * i], second));
        $KEEP_WORD
    }
