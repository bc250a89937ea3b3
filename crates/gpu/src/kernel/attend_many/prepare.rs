//! What a workgroup of [`AttendMany`] does before it attends. Queries go to workgroup memory, after
//! norm, rotation and scaling as in the kernel `prepare_append`; the row's own key and value go to
//! the cache.

use super::{AttendMany, THREADS, UNIT};

/// Threads that share the columns of a head.
const OF_HEAD: usize = 64;
/// Heads that are prepared at a time.
const AT_ONCE: usize = THREADS / OF_HEAD;

impl AttendMany {
    /// Heads that a thread prepares one after the other: first those of queries, then the key's.
    fn rounds(self) -> usize {
        (self.heads + usize::from(self.can_prepare())).div_ceil(AT_ONCE)
    }

    /// Columns of a head that a thread handles.
    fn columns_of_thread(self) -> usize {
        self.units * UNIT / OF_HEAD
    }

    fn each_round(self, line: impl Fn(usize) -> String) -> String {
        let slots = self.heads + usize::from(self.can_prepare());
        let one = |r: usize| {
            let guard = match (r + 1) * AT_ONCE <= slots {
                true => String::new(),
                false => format!("if (slot{r} < {slots}u) "),
            };
            format!("{guard}{{\n{}}}\n", line(r))
        };
        (0..self.rounds()).map(one).collect()
    }

    pub(super) fn queries(self) -> String {
        let mut text = format!("let column = thread % {OF_HEAD}u;\n");
        let is_key = |r: usize| match self.can_prepare() {
            true => format!("slot{r} == HEADS && fresh"),
            false => "false".to_owned(),
        };
        // All loads come before the first use.
        for r in 0..self.rounds() {
            text += &format!(
                "let slot{r} = thread / {OF_HEAD}u + {}u;
let source{r} = row * args.x_stride + args.key_dim * select(group.y + min(slot{r}, group.z - 1u), args.heads + group.x, {});
",
                r * AT_ONCE,
                is_key(r)
            );
            for c in 0..self.columns_of_thread() {
                text += &format!(
                    "let x{r}_{c} = x[source{r} + min(column + {}u, args.key_dim - 1u)];\n",
                    c * OF_HEAD
                );
            }
        }
        if self.can_prepare() {
            text += &self.ask();
        }
        text += &self.each_round(|r| {
            let store = |c: usize| {
                format!(
                    "{{ let i = column + {}u;
query[(slot{r} * UNITS * 8u + i) / 4u][i % 4u] = select(0.0, x{r}_{c}, i < args.key_dim); }}
",
                    c * OF_HEAD
                )
            };
            (0..self.columns_of_thread()).map(store).collect()
        });
        if self.can_prepare() {
            text += &self.prepare();
        }
        text += "workgroupBarrier();\n";
        if self.can_prepare() {
            text += OWN;
        }
        text
    }

    /// Pairs of a head that a thread rotates.
    fn pairs(self) -> usize {
        (self.columns_of_thread() / 2).max(1)
    }

    /// Loads rotations and the row's own value.
    fn ask(self) -> String {
        let mut text = String::new();
        for p in 0..self.pairs() {
            text += &format!(
                "let turn_at{p} = 2u * (args.rotations + row * args.pairs + min(column + {}u, max(args.pairs, 1u) - 1u));
let turn{p} = vec2<f32>(bitcast<f32>(tables[turn_at{p}]), bitcast<f32>(tables[turn_at{p} + 1u]));
",
                p * OF_HEAD
            );
        }
        text + "let own_word = thread % 128u;
let of_value = args.key_dim * (args.heads + args.kv_heads) + args.value_dim * group.x + 2u * min(own_word, args.value_dim / 2u - 1u);
let own_at = row * args.x_stride + select(0u, of_value, fresh);
let own_pair = vec2<f32>(x[own_at], x[own_at + 1u]);
"
    }

    fn prepare(self) -> String {
        let squares = self.each_round(|r| {
            let add = |c: usize| {
                format!(
                    "{{ let value = select(0.0, x{r}_{c}, column + {}u < args.key_dim); square = fma(value, value, square); }}\n",
                    c * OF_HEAD
                )
            };
            let adds: String = (0..self.columns_of_thread()).map(add).collect();
            format!(
                "var square = 0.0;\n{adds}scores[slot{r} * 16u + column / 4u][column % 4u] = square;\n"
            )
        });
        let halve = self.each_round(|r| {
            format!(
                "if (column < half) {{
    let other = column + half;
    scores[slot{r} * 16u + column / 4u][column % 4u] += scores[slot{r} * 16u + other / 4u][other % 4u];
}}
"
            )
        });
        let turn = self.each_round(|r| self.turn(r));
        format!(
            "if (prepares) {{
    let has_norms = (args.flags & NORMS) != 0u;
    if (has_norms) {{
        {squares}
        workgroupBarrier();
        for (var half = {}u; half > 0u; half /= 2u) {{
            {halve}
            workgroupBarrier();
        }}
    }} else {{
        workgroupBarrier();
    }}
    var scale = args.scale;
    if (args.original > 0u) {{ scale *= 1.0 + args.beta * log(1.0 + f32(position / args.original)); }}
    {turn}
}}
",
            OF_HEAD / 2
        )
    }

    /// Norms, rotates and scales the columns of a head in place. Each column belongs to one thread.
    fn turn(self, r: usize) -> String {
        let read = |name: &str, at: &str| {
            format!(
                "var {name} = query[first + {at} / 4u][{at} % 4u];
if (has_norms) {{ {name} = {name} / rms * select(query_norm[{at}], key_norm[{at}], is_key); }}
"
            )
        };
        let mut text = format!(
            "let first = slot{r} * UNITS * 2u;
let is_key = slot{r} == HEADS;
let factor = select(scale, 1.0, is_key);
var rms = 1.0;
if (has_norms) {{ rms = sqrt(scores[slot{r} * 16u].x / f32(args.key_dim) + args.eps); }}
"
        );
        for p in 0..self.pairs() {
            text += &format!(
                "{{ let pair = column + {}u;
if (pair < args.pairs) {{
    let has_neighbours = (args.flags & NEIGHBOURS) != 0u;
    let a_at = select(pair, 2u * pair, has_neighbours);
    let b_at = select(pair + args.pairs, 2u * pair + 1u, has_neighbours);
    {}{}query[first + a_at / 4u][a_at % 4u] = fma(a, turn{p}.x, -(b * turn{p}.y)) * factor;
    query[first + b_at / 4u][b_at % 4u] = fma(b, turn{p}.x, a * turn{p}.y) * factor;
}} }}
",
                p * OF_HEAD,
                read("a", "a_at"),
                read("b", "b_at"),
            );
        }
        for c in 0..self.columns_of_thread() {
            text += &format!(
                "{{ let i = column + {}u;
if (i >= 2u * args.pairs && i < args.key_dim) {{
    {}query[first + i / 4u][i % 4u] = value * factor;
}} }}
",
                c * OF_HEAD,
                read("value", "i"),
            );
        }
        text
    }

    /// Stores the row's own key and value in place of those read from the cache.
    pub(super) fn fresh(self) -> String {
        if !self.can_prepare() {
            return String::new();
        }
        let mut text = "if (fresh) {\n".to_owned();
        for t in 0..self.scored() {
            text += &format!("if ({} == position) {{\n", Self::scored_token(t, "end - 1u"));
            for i in 0..self.units_of_thread() {
                text +=
                    &format!("key{t}_{i} = own_key[min(lane + {}u, key_units - 1u)];\n", super::LANES * i);
            }
            text += "}\n";
        }
        for i in 0..self.reads() {
            text += &format!(
                "if ({} == position) {{ value{i} = own_value[value_unit]; }}\n",
                self.read_token(i, "end - 1u")
            );
        }
        text + "}\n"
    }
}

/// Rounds the row's own key and value, for this workgroup and for the cache.
const OWN: &str = "if (fresh) {
    let vector = (tables[blocks + position / 32u] * args.kv_heads + group.x) * 32u + position % 32u;
    if (thread < args.key_dim / 2u) {
        let i = HEADS * UNITS * 2u + thread / 2u;
        let second = thread % 2u * 2u;
        let word = pack2x16float(vec2<f32>(query[i][second], query[i][second + 1u]));
        own_key[thread / 4u][thread % 4u] = word;
        keys[vector * key_units + thread / 4u][thread % 4u] = word;
    }
    if (thread >= 128u && own_word < args.value_dim / 2u) {
        let word = pack2x16float(own_pair);
        own_value[own_word / 4u][own_word % 4u] = word;
        values[vector * value_units + own_word / 4u][own_word % 4u] = word;
    }
    workgroupBarrier();
}
";
