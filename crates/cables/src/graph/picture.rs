//! The graph for Graphviz, and as a picture.

use std::f64::consts::TAU;
use std::fmt::Write as _;

use super::{Cable, Desk};

/// Sizes of the picture, in its own units.
const RADIUS: f64 = 220.0;
const BOX: (f64, f64) = (190.0, 60.0);
const MARGIN: f64 = 130.0;
/// Distance between two cables of one pair.
const APART: f64 = 26.0;

impl Desk {
    /// The graph in Graphviz's language.
    pub fn dot(&self) -> String {
        let mut text = "graph desk {\n  node [shape=box];\n".to_owned();
        for (index, machine) in self.machines.iter().enumerate() {
            let label = format!("{}\n{}", machine.name, machine.description());
            let _ = writeln!(text, "  m{index} [label={}];", quoted(&label));
        }
        for cable in &self.cables {
            let [one, other] = cable.ends;
            let style = if self.rdma_obstacles(cable).is_empty() { "bold" } else { "solid" };
            let _ = writeln!(
                text,
                "  m{} -- m{} [label={}, taillabel={}, headlabel={}, style={style}];",
                one.machine,
                other.machine,
                quoted(&self.label(cable)),
                quoted(&self.port(one).name),
                quoted(&self.port(other).name),
            );
        }
        text.push_str("}\n");
        text
    }

    fn label(&self, cable: &Cable) -> String {
        let kind = if self.rdma_obstacles(cable).is_empty() { "RDMA" } else { "TCP" };
        cable.gbits.map_or_else(|| kind.to_owned(), |gbits| format!("{gbits} Gbit/s {kind}"))
    }

    /// The graph as an SVG picture: machines on a circle, cables as lines; thick ones carry RDMA.
    pub fn svg(&self) -> String {
        let side = 2.0 * (RADIUS + MARGIN);
        let mut text = format!(
            "<svg xmlns=\"http://www.w3.org/2000/svg\" viewBox=\"0 0 {side} {side}\" font-family=\"sans-serif\" font-size=\"13\">\n\
             <rect width=\"100%\" height=\"100%\" fill=\"white\"/>\n"
        );
        let count = self.machines.len().max(1) as f64;
        let place = |index: usize| {
            // Two machines side by side; more from the left upper corner on.
            let angle = TAU * (index as f64 / count) - TAU / 2.0
                + if count > 2.0 { TAU / (2.0 * count) } else { 0.0 };
            (side / 2.0 + RADIUS * angle.cos(), side / 2.0 + RADIUS * angle.sin())
        };
        for (index, cable) in self.cables.iter().enumerate() {
            let pair = cable.machines();
            let lane = self.cables[..index].iter().filter(|earlier| earlier.machines() == pair).count();
            let lanes = self.between(pair[0], pair[1]).count();
            let shift = (lane as f64 - (lanes as f64 - 1.0) / 2.0) * APART;
            self.draw_cable(&mut text, cable, pair.map(place), shift);
        }
        for (index, machine) in self.machines.iter().enumerate() {
            let (x, y) = place(index);
            let (left, top) = (x - BOX.0 / 2.0, y - BOX.1 / 2.0);
            let _ = writeln!(
                text,
                "<rect x=\"{left:.0}\" y=\"{top:.0}\" width=\"{}\" height=\"{}\" rx=\"8\" fill=\"#eef3fa\" stroke=\"#335\"/>\n\
                 <text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\" font-weight=\"bold\">{}</text>\n\
                 <text x=\"{x:.0}\" y=\"{:.0}\" text-anchor=\"middle\" font-size=\"11\">{}</text>",
                BOX.0,
                BOX.1,
                y - 4.0,
                escaped(&machine.name),
                y + 14.0,
                escaped(machine.chip.as_deref().or(machine.model.as_deref()).unwrap_or("")),
            );
        }
        text.push_str("</svg>\n");
        text
    }

    fn draw_cable(&self, text: &mut String, cable: &Cable, places: [(f64, f64); 2], shift: f64) {
        let [(x1, y1), (x2, y2)] = places;
        let length = (x2 - x1).hypot(y2 - y1).max(1.0);
        let (dx, dy) = (-(y2 - y1) / length * shift, (x2 - x1) / length * shift);
        let width = if self.rdma_obstacles(cable).is_empty() { 4 } else { 2 };
        let slow = if self.slow_cable(cable).is_some() { "#c40" } else { "#335" };
        let ports = cable.ends.map(|end| self.port(end).name.clone()).join("–");
        // Off the middle, so that the labels of two diagonals do not meet.
        let (label_x, label_y) = (x1 + (x2 - x1) * 0.42 + dx, y1 + (y2 - y1) * 0.42 + dy);
        let _ = writeln!(
            text,
            "<line x1=\"{:.0}\" y1=\"{:.0}\" x2=\"{:.0}\" y2=\"{:.0}\" stroke=\"{slow}\" stroke-width=\"{width}\"/>\n\
             <text x=\"{label_x:.0}\" y=\"{:.0}\" text-anchor=\"middle\" paint-order=\"stroke\" stroke=\"white\" stroke-width=\"4\">{}</text>",
            x1 + dx,
            y1 + dy,
            x2 + dx,
            y2 + dy,
            label_y - 4.0,
            escaped(&format!("{} ({ports})", self.label(cable))),
        );
    }
}

fn quoted(text: &str) -> String {
    format!("\"{}\"", text.replace('\\', "\\\\").replace('"', "\\\"").replace('\n', "\\n"))
}

fn escaped(text: &str) -> String {
    text.replace('&', "&amp;").replace('<', "&lt;").replace('>', "&gt;").replace('"', "&quot;")
}
