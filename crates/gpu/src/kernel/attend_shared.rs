//! WGSL of attention to compressed vectors by all query heads of a row together: of generated
//! tokens, and of all rows that attend to selected or compressed tokens.

use super::Access;
use super::attend::split;
use super::attend_block::{Block, Part, columns_for};
use super::attend_many::unit_type;
use super::select::{BOTH_COUNT, BOTH_FIND, SELECTED_COUNT, SELECTED_FIND};

/// One compiled form of [`super::Kernel::AttendShared`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct AttendShared {
    pub tokens: Attended,
    /// Maximum query heads of a workgroup.
    pub heads: usize,
    /// Maximum columns of a value.
    pub columns: usize,
    /// The caches have bytes with scales, otherwise f16.
    pub int8: bool,
}

/// The tokens that a row attends to.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) enum Attended {
    /// All of its sequence.
    All,
    /// Those of a list.
    Selected,
    /// Those of a window, and compressed ones in a second cache: all, or those of a list.
    Both,
}

/// Query heads of the forms. 32 at a time were slower on an H200; 16 were measured with 16 heads in
/// all (docs/lab/2026-11-28-latent.md).
const HEADS: [usize; 2] = [8, 16];

impl AttendShared {
    /// The form for vectors whose parts have these widths, if there is one, with the fewest heads.
    pub fn of(tokens: Attended, widths: [usize; 2], int8: bool) -> Option<Self> {
        let [first, second] = widths;
        let value = if tokens == Attended::Both { first + second } else { first };
        let columns = columns_for(value, widths).filter(|_| first > 0)?;
        Some(Self { tokens, heads: HEADS[0], columns, int8 })
    }

    pub fn with_fewest_heads(self) -> Self {
        Self { heads: HEADS[0], ..self }
    }

    pub fn with_most_heads(self) -> Self {
        Self { heads: HEADS[HEADS.len() - 1], ..self }
    }

    /// Every form.
    #[cfg(test)]
    pub fn all() -> impl Iterator<Item = Self> {
        let forms = |tokens, heads, columns| [false, true].map(|int8| Self { tokens, heads, columns, int8 });
        [Attended::All, Attended::Selected, Attended::Both].into_iter().flat_map(move |tokens| {
            HEADS.into_iter().flat_map(move |heads| {
                super::attend_block::COLUMNS
                    .into_iter()
                    .flat_map(move |columns| forms(tokens, heads, columns))
            })
        })
    }

    /// The names of the caches' parts.
    fn caches(self) -> &'static [&'static str] {
        match self.tokens {
            Attended::Both => &["first", "second", "more_first", "more_second"],
            _ => &["first", "second"],
        }
    }

    /// Buffers before those of the caches.
    fn inputs(self) -> &'static [(&'static str, &'static str)] {
        match self.tokens {
            Attended::All => &[("turned", "vec4<f32>")],
            Attended::Selected => &[("turned", "vec4<f32>"), ("selection", "f32")],
            Attended::Both => &[("selection", "f32")],
        }
    }

    pub fn bindings(self) -> Vec<Access> {
        let mut all = vec![Access::Read; 2 + self.inputs().len() + self.caches().len()];
        all.push(Access::Write);
        if self.int8 {
            all.extend(vec![Access::Read; self.caches().len()]);
        }
        all
    }

    pub fn source(self) -> String {
        let mut bindings = Vec::new();
        for (name, kind) in self.inputs() {
            bindings.push(format!("read> {name}: array<{kind}>"));
        }
        for name in self.caches() {
            bindings.push(format!("read> {name}: array<{}>", unit_type(self.int8)));
        }
        bindings.push("read_write> parts: array<f32>".to_owned());
        for name in self.caches().iter().filter(|_| self.int8) {
            bindings.push(format!("read> {name}_scales: array<f32>"));
        }
        let bindings: String = bindings
            .iter()
            .enumerate()
            .map(|(index, text)| format!("@group(0) @binding({}) var<storage, {text};\n", index + 2))
            .collect();
        let turned = if self.tokens == Attended::Both { "queries" } else { "turned" };
        let declare =
            |read: String| format!("var stored: {};\nvar scale = 1.0;\n{read}", unit_type(self.int8));
        let (first, second) = (self.read("first", "unit"), self.read("second", "unit"));
        let (value, value_units) = match self.tokens {
            Attended::Both => {
                let rest = self.read("second", "(unit - args.first_units)");
                let value = format!("if (unit < args.first_units) {{\n{first}}} else {{\n{rest}}}\n");
                (value, "args.first_units + args.second_units")
            }
            _ => (first.clone(), "args.first_units"),
        };
        let (list, count, find) = match self.tokens {
            Attended::All => ("", ALL_COUNT, ALL_FIND),
            Attended::Selected => (LIST, SELECTED_COUNT, SELECTED_FIND),
            Attended::Both => (LIST, BOTH_COUNT, BOTH_FIND),
        };
        let second_query = format!(
            "{turned}[row * args.second_stride + args.second_first + \
             min(head + query, args.heads - 1u) * args.second_of_head + quad]"
        );
        let block = Block {
            queries: self.heads,
            columns: self.columns,
            int8: self.int8,
            parts: [
                Part {
                    query: "queries[row * args.first_stride + \
                            min(head + query, args.heads - 1u) * args.first_of_head + quad]",
                    units: "args.first_units",
                    read: declare(first),
                },
                Part { query: &second_query, units: "args.second_units", read: declare(second) },
            ],
            value: declare(value),
            value_units,
            is_used: "begin + token < end",
            mask: MASK,
        };
        block
            .insert(include_str!("attend_shared.wgsl"), STORE)
            .replace("$BINDINGS", &bindings)
            .replace("$HEADS", &self.heads.to_string())
            .replace("$SPLIT", &split())
            .replace("$PLACE", include_str!("select/place.wgsl"))
            .replace("$COUNT", &(list.to_owned() + count))
            .replace("$FIND", find)
    }

    /// Reads a unit of a part of a token's vector: of the first cache if the token is in the
    /// window.
    fn read(self, part: &str, unit: &str) -> String {
        let of_cache = |name: &str| {
            let scale = format!("scale = {name}_scales[places[token]];\n");
            let stored = format!("stored = {name}[places[token] * args.{part}_units + {unit}];\n");
            if self.int8 { stored + &scale } else { stored }
        };
        match self.tokens {
            Attended::Both => format!(
                "if (min(begin + token, end - 1u) < in_window) {{\n{}}} else {{\n{}}}\n",
                of_cache(part),
                of_cache(&format!("more_{part}"))
            ),
            _ => of_cache(part),
        }
    }
}

const LIST: &str = "let list = row * args.selection_stride;\n";

const ALL_COUNT: &str = "let count = tables[args.table + row * 4u] + 1u;";

const ALL_FIND: &str = "places[thread] = place_of(number, 1u, blocks);";

/// Tokens after the split's last.
const MASK: &str = "let number = vec4<u32>(begin + column * 4u) + vec4<u32>(0u, 1u, 2u, 3u);
        four = select(vec4<f32>(NONE), four, number < vec4<u32>(end));";

const STORE: &str = "if (query < $HEADSu && head + query < args.heads && d + 2u < args.part_stride) {
        parts[(part + query * args.splits) * args.part_stride + 2u + d] = value;
    }";
