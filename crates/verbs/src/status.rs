//! The status of a completion.

/// Declares the statuses from one list: the C header's number, the variant, the header's name, the
/// meaning.
macro_rules! statuses {
    ($($number:literal $variant:ident $name:literal $meaning:literal;)*) => {
        /// The status of a completion, as in `enum ibv_wc_status`.
        #[derive(Debug, Clone, Copy, PartialEq, Eq)]
        pub enum WcStatus {
            $(#[doc = $meaning] $variant,)*
            /// A number that the C header does not define.
            Unknown(i32),
        }

        impl WcStatus {
            /// The status with this number.
            pub fn from_raw(number: i32) -> Self {
                match number { $($number => Self::$variant,)* other => Self::Unknown(other) }
            }

            /// The meaning, as a message for users.
            pub fn meaning(self) -> &'static str {
                match self { $(Self::$variant => $meaning,)* Self::Unknown(_) => "a status that verbs.h does not define" }
            }
        }

        impl std::fmt::Display for WcStatus {
            fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
                match self { $(Self::$variant => f.write_str($name),)* Self::Unknown(n) => write!(f, "status {n}") }
            }
        }
    };
}

statuses! {
    0 Success "IBV_WC_SUCCESS" "it succeeded";
    1 LocLen "IBV_WC_LOC_LEN_ERR" "the posted receive is shorter than the message, or the message is longer than the port allows";
    2 LocQpOp "IBV_WC_LOC_QP_OP_ERR" "the local queue pair cannot do this operation";
    3 LocEecOp "IBV_WC_LOC_EEC_OP_ERR" "the local end-to-end context is inconsistent";
    4 LocProt "IBV_WC_LOC_PROT_ERR" "the local memory is not registered for this";
    5 WrFlush "IBV_WC_WR_FLUSH_ERR" "the queue pair failed earlier; the first error is the cause";
    6 MwBind "IBV_WC_MW_BIND_ERR" "a memory window could not be bound";
    7 BadResp "IBV_WC_BAD_RESP_ERR" "the peer sent a response that the protocol does not allow";
    8 LocAccess "IBV_WC_LOC_ACCESS_ERR" "the peer wrote to local memory without permission";
    9 RemInvReq "IBV_WC_REM_INV_REQ_ERR" "the peer refused the request: its posted receive is too short, or it does not support the operation";
    10 RemAccess "IBV_WC_REM_ACCESS_ERR" "the peer's memory key or address is wrong, or does not permit the operation";
    11 RemOp "IBV_WC_REM_OP_ERR" "the peer could not perform the operation";
    12 RetryExc "IBV_WC_RETRY_EXC_ERR" "the peer does not answer: it has ended, its queue pair is closed, or the cable is unplugged";
    13 RnrRetryExc "IBV_WC_RNR_RETRY_EXC_ERR" "the peer did not post a receive in time";
    14 LocRddViol "IBV_WC_LOC_RDD_VIOL_ERR" "the reliable datagram domains differ";
    15 RemInvRdReq "IBV_WC_REM_INV_RD_REQ_ERR" "the peer refused a reliable datagram request";
    16 RemAbort "IBV_WC_REM_ABORT_ERR" "the peer aborted the operation";
    17 InvEecn "IBV_WC_INV_EECN_ERR" "the end-to-end context number is invalid";
    18 InvEecState "IBV_WC_INV_EEC_STATE_ERR" "the end-to-end context is in the wrong state";
    19 Fatal "IBV_WC_FATAL_ERR" "the device failed and may need a restart";
    20 RespTimeout "IBV_WC_RESP_TIMEOUT_ERR" "the peer's response timed out";
    21 General "IBV_WC_GENERAL_ERR" "the transport failed without an explanation";
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_unknown_status_keeps_its_number() {
        assert_eq!(WcStatus::from_raw(99).to_string(), "status 99");
    }
}
