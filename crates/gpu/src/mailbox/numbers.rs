//! The numbers of a mailbox's exchanges.

use std::sync::mpsc::Sender;
use std::sync::{Mutex, PoisonError};

use super::boxes::Boxes;
use super::worker::{Exchange, Order};
use crate::device::numbering::{ARGUMENTS, Last, Numbering};
use crate::kernel::{Coherent, Exchange as Form, Kernel};

/// Numbers exchanges in the order in which the device gets them, and tells the worker of each. A
/// step that the device gets ahead, or again, has other numbers than the step that it repeats.
pub(super) struct Numbers {
    last: Last,
    /// To the worker, until it ends. Only the thread that records takes this lock.
    orders: Mutex<Option<Sender<Order>>>,
}

impl Numbers {
    pub fn new(orders: Sender<Order>) -> Self {
        Self { last: Last::default(), orders: Mutex::new(Some(orders)) }
    }

    /// Sends an order to the worker. Returns false if it has ended.
    pub fn order(&self, order: Order) -> bool {
        let orders = self.orders.lock().unwrap_or_else(PoisonError::into_inner);
        orders.as_ref().is_some_and(|orders| orders.send(order).is_ok())
    }

    /// Lets the worker end.
    pub fn close(&self) {
        *self.orders.lock().unwrap_or_else(PoisonError::into_inner) = None;
    }

    /// The number of the last exchange.
    pub fn last(&self) -> u32 {
        self.last.get()
    }

    #[cfg(test)]
    pub fn set_last(&self, number: u32) {
        self.last.set(number);
    }

    /// The number of the next exchange, which the worker serves from now on. `gate`: the one that
    /// the answer opens, if there are gates.
    pub fn next(&self, [rows, width, stride]: [usize; 3], gate: u64) -> u32 {
        let number = self.last.advance();
        // If the worker has ended, the device has been told to give up.
        self.order(Order::Exchange(Exchange { number, gate, rows, width, stride }));
        number
    }
}

impl Numbering for Numbers {
    fn numbered(&self, kernel: &Kernel, arguments: &[u32]) -> Option<[u32; ARGUMENTS]> {
        let &[first, count, _, _, looks, groups, width, stride] = arguments else { return None };
        let number = match kernel {
            Kernel::Exchange(Form::Send | Form::Both { .. }) | Kernel::Coherent(Coherent::Send) => {
                let rows = 4 * count / stride;
                self.next([rows, width, stride].map(|number| number as usize), 0)
            }
            // A later kernel of the same exchange.
            Kernel::Exchange(Form::Receive { .. }) | Kernel::Coherent(_) => self.last(),
            _ => return None,
        };
        Some([first, count, Boxes::first_vector(number) as u32, number, looks, groups])
    }
}
