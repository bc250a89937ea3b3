//! Monthly energy and costs: machines, energy and other costs, and the same usage at an API's
//! prices.

use serde::{Deserialize, Serialize};

/// Days of a mean month.
pub(crate) const DAYS: f64 = 365.25 / 12.0;

/// Prices. A missing price leaves out its part of the costs.
#[derive(Debug, Clone, PartialEq, Deserialize)]
#[serde(deny_unknown_fields, default)]
pub struct Prices {
    /// The currency: three capital letters, or a symbol ([`is_currency`]).
    pub currency: String,
    /// Of each machine.
    pub machine_price: Option<f64>,
    /// Years that a machine is used.
    pub years: f64,
    /// Of a kilowatt hour.
    pub kwh_price: f64,
    /// Other costs a month: room, support, spare parts.
    pub other_month: f64,
    /// An API's price of a million prompt tokens.
    pub api_input: Option<f64>,
    /// An API's price of a million answer tokens.
    pub api_output: Option<f64>,
}

impl Default for Prices {
    fn default() -> Self {
        Self {
            currency: "EUR".into(),
            machine_price: None,
            years: 3.0,
            kwh_price: 0.30,
            other_month: 0.0,
            api_input: None,
            api_output: None,
        }
    }
}

/// Whether a text is a code of ISO 4217, or a symbol of up to three letters and signs: `EUR`, `€`,
/// `kr`, `R$`.
pub fn is_currency(text: &str) -> bool {
    const SIGNS: &str = "$¢£¤¥֏؋৳฿៛₠₡₢₣₤₥₦₧₨₩₪₫€₭₮₯₰₱₲₳₴₵₸₹₺₻₼₽₾₿";
    (1..=3).contains(&text.chars().count())
        && text.chars().all(|sign| sign.is_alphabetic() || SIGNS.contains(sign))
}

/// The use of machines in a month.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Month {
    /// Machines.
    pub machines: f64,
    /// Watts of all machines when idle.
    pub idle_watts: f64,
    /// Watts of all machines when busy.
    pub busy_watts: f64,
    /// Share of all hours in which they are busy.
    pub busy: f64,
    /// Users.
    pub users: f64,
    /// Prompt tokens of all users.
    pub prompt_tokens: f64,
    /// Answer tokens of all users.
    pub answer_tokens: f64,
}

/// Power, and energy a month. It needs no price.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Energy {
    /// Watts of all machines when idle.
    pub idle_watts: f64,
    /// Watts of all machines when those of the layout are busy.
    pub busy_watts: f64,
    /// Mean watts of all hours.
    pub mean_watts: f64,
    /// Energy.
    pub kwh_month: f64,
    /// The energy divided by the users.
    pub kwh_user_month: f64,
    /// Energy above idle for each answer token; `None` without answers.
    pub joules_token: Option<f64>,
}

impl Month {
    /// The energy of the month.
    pub fn energy(&self) -> Energy {
        let busy_watts = (self.busy_watts - self.idle_watts) * self.busy;
        let mean_watts = self.idle_watts + busy_watts;
        let kwh_month = mean_watts * DAYS * 24.0 / 1000.0;
        let above_idle_j = busy_watts * DAYS * 86_400.0;
        Energy {
            idle_watts: self.idle_watts,
            busy_watts: self.busy_watts,
            mean_watts,
            kwh_month,
            kwh_user_month: kwh_month / self.users.max(1.0),
            joules_token: (self.answer_tokens > 0.0).then(|| above_idle_j / self.answer_tokens),
        }
    }
}

/// Costs a month.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct Costs {
    /// Letters of the currency.
    pub currency: String,
    /// Price of the machines divided by the months of their use.
    pub amortisation_month: f64,
    /// Energy.
    pub energy_kwh_month: f64,
    /// Its price.
    pub energy_month: f64,
    /// Other costs.
    pub other_month: f64,
    /// All.
    pub total_month: f64,
    /// The total divided by the users.
    pub user_month: f64,
    /// Energy above idle for each answer token; `None` without answers.
    pub joules_token: Option<f64>,
    /// The cost of a user at the API's prices, if they are given.
    pub api_user_month: Option<f64>,
}

impl Prices {
    /// The costs of a month; `None` without a price of the machines.
    pub fn costs(&self, month: &Month) -> Option<Costs> {
        let amortisation = self.machine_price? * month.machines / (self.years * 12.0);
        let Energy { kwh_month: kwh, joules_token, .. } = month.energy();
        let (energy, other) = (kwh * self.kwh_price, self.other_month);
        let total = amortisation + energy + other;
        let users = month.users.max(1.0);
        let api = self.api_input.zip(self.api_output).map(|(input, output)| {
            (input * month.prompt_tokens + output * month.answer_tokens) / 1e6 / users
        });
        Some(Costs {
            currency: self.currency.clone(),
            amortisation_month: amortisation,
            energy_kwh_month: kwh,
            energy_month: energy,
            other_month: other,
            total_month: total,
            user_month: total / users,
            joules_token,
            api_user_month: api,
        })
    }
}

/// Working days of a month: five of seven.
pub const WORKING_DAYS: f64 = DAYS * 5.0 / 7.0;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_month_is_amortisation_and_energy_and_the_rest() {
        let prices = Prices {
            currency: "GBP".into(),
            machine_price: Some(3600.0),
            years: 3.0,
            kwh_price: 0.25,
            other_month: 100.0,
            api_input: Some(2.0),
            api_output: Some(10.0),
        };
        let month = Month {
            machines: 2.0,
            idle_watts: 100.0,
            busy_watts: 500.0,
            busy: 0.25,
            users: 10.0,
            prompt_tokens: 30e6,
            answer_tokens: 4e6,
        };
        let costs = prices.costs(&month).expect("there is a price");
        // 2 x 3600 over 36 months; 200 W for 730.5 h are 146.1 kWh; 36.525; 100; 10 users.
        assert_eq!(costs.amortisation_month, 200.0);
        assert!((costs.energy_kwh_month - 146.1).abs() < 1e-9);
        assert!((costs.total_month - 336.525).abs() < 1e-9 && (costs.user_month - 33.6525).abs() < 1e-9);
        assert_eq!(costs.api_user_month, Some(10.0));
        // 100 W above idle for 2,629,800 s, over 4 million tokens.
        assert!((costs.joules_token.expect("answers") - 65.745).abs() < 1e-3);
        assert_eq!(Prices::default().costs(&month), None);
        // Power and energy are known without a price.
        let energy = month.energy();
        assert_eq!((energy.idle_watts, energy.busy_watts, energy.mean_watts), (100.0, 500.0, 200.0));
        assert!((energy.kwh_month - 146.1).abs() < 1e-9 && (energy.kwh_user_month - 14.61).abs() < 1e-9);
        assert_eq!(energy.joules_token, costs.joules_token);
    }

    #[test]
    fn a_currency_is_a_code_or_a_short_symbol() {
        for good in ["EUR", "GBP", "€", "£", "$", "kr", "zł", "R$", "US$", "¥"] {
            assert!(is_currency(good), "{good}");
        }
        for bad in ["", " ", "<b>", "EURO", "E R", "€\n", "1", "\"", "&eu", "\u{202e}", "a.b"] {
            assert!(!is_currency(bad), "{bad:?}");
        }
    }

    /// The example of docs/capacity.md, each of its terms.
    #[test]
    fn the_worked_example_of_the_documentation_is_what_is_computed() {
        let prices = Prices {
            currency: "GBP".into(),
            machine_price: Some(8200.0),
            years: 3.0,
            kwh_price: 0.30,
            other_month: 1500.0,
            api_input: None,
            api_output: None,
        };
        let month = Month {
            machines: 4.0,
            idle_watts: 4.0 * 15.0,
            busy_watts: 4.0 * 270.0,
            busy: 0.20,
            users: 50.0,
            prompt_tokens: 0.0,
            answer_tokens: 0.0,
        };
        let costs = prices.costs(&month).expect("there is a price");
        assert_eq!(format!("{:.2}", costs.user_month), "49.38");
        let document = include_str!("../../../docs/capacity.md");
        let example = document.split("## A worked example").nth(1).expect("it is there");
        for term in [
            format!("£{:.2}", costs.amortisation_month),
            format!("{:.3} kWh", costs.energy_kwh_month),
            format!("£{:.2}", costs.energy_month),
            format!("£{:.2}", costs.other_month),
            format!("£{:.2}", costs.total_month),
            format!("**£{:.2}**", costs.user_month),
        ] {
            assert!(example.contains(&term), "docs/capacity.md lacks {term}");
        }
    }
}
