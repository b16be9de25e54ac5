//! The client of the provider, with the quota around it.

use std::time::Duration;

use bytes::Bytes;
use futures_util::stream::{self, BoxStream};
use futures_util::{StreamExt, TryStreamExt};
use http::request::Parts;
use http::{Request, Response};
use http_body_util::{BodyExt, Full};
use hyper::body::Incoming;
use hyper_util::client::legacy::Client;
use hyper_util::client::legacy::connect::HttpConnector;
use hyper_util::rt::TokioExecutor;
use tower::{Layer, ServiceExt};
use tower_semaphore::limit::{BoxError, ExtensionKey, KeyLabels, ResponseBody};
use tower_semaphore::{
    ConcurrencyLimit, ConcurrencyLimitLayer, ConfigError, Name, OnUnavailable, Semaphore,
};

use crate::tenants::Tenant;

/// The concurrent requests that the provider allows, for all replicas together.
pub(crate) const QUOTA: u32 = 6;
/// The name of the quota's semaphore.
pub(crate) const NAME: &str = "llm";
/// Replicas of this gateway. Used only while Redis is unreachable.
const REPLICAS: u32 = 3;

/// An answer of the provider, or a refusal. Its body holds the permit.
pub(crate) type Answer = Response<ResponseBody<Incoming>>;

/// The quota, shared by the tenants according to their plans.
pub(crate) fn quota(semaphore: &Semaphore) -> Result<ConcurrencyLimitLayer, ConfigError> {
    ConcurrencyLimitLayer::builder(semaphore, NAME)
        .limit(QUOTA)
        .fair_by(ExtensionKey::<Tenant>::new())
        .weight_by(|_: &Name, parts: &Parts| Tenant::plan_of(parts).weight())
        .each_by(|_: &Name, parts: &Parts| Tenant::plan_of(parts).requests())
        .wait_timeout(Duration::from_secs(10))
        .max_queue(20) // of each tenant
        .on_unavailable(OnUnavailable::Local(QUOTA / REPLICAS))
        .tenant_labels(KeyLabels::listed(Tenant::names()))
        .build()
}

/// Calls the provider.
#[derive(Clone)]
pub(crate) struct Llm {
    // Around the client and not on a route, so that no permit is held while a prompt is uploaded.
    client: ConcurrencyLimit<Client<HttpConnector, Full<Bytes>>>,
    url: String,
}

impl Llm {
    pub(crate) fn new(quota: &ConcurrencyLimitLayer, url: String) -> Self {
        let client = Client::builder(TokioExecutor::new()).build_http();
        Self { client: quota.layer(client), url }
    }

    /// Asks for the answer to a prompt, as soon as the tenant has a permit.
    pub(crate) async fn ask(&self, tenant: Tenant, prompt: String) -> Result<Answer, BoxError> {
        let mut request = Request::post(&self.url)
            .header("x-user", tenant.name)
            .body(Full::new(Bytes::from(prompt)))?;
        request.extensions_mut().insert(tenant);
        Ok(self.client.clone().oneshot(request).await?)
    }

    /// As [`ask`](Self::ask), token by token. Dropping the stream leaves the queue, or cancels the request.
    pub(crate) fn tokens(
        self,
        tenant: Tenant,
        prompt: String,
    ) -> BoxStream<'static, Result<String, BoxError>> {
        let tokens = async move {
            let answer = self.ask(tenant, prompt).await?;
            match answer.status() {
                status if status.is_success() => Ok(events(answer)),
                status => Err(BoxError::from(format!("no answer: {status}"))),
            }
        };
        stream::once(tokens).try_flatten().boxed()
    }
}

/// The data of each server-sent event.
fn events(answer: Answer) -> BoxStream<'static, Result<String, BoxError>> {
    let frames = answer.into_body().into_data_stream();
    let events = stream::try_unfold((frames, Vec::new()), |(mut frames, mut buffer)| async move {
        loop {
            if let Some(end) = buffer.iter().position(|&byte| byte == b'\n') {
                let line: Vec<u8> = buffer.drain(..=end).collect();
                let line = String::from_utf8(line)?;
                if let Some(data) = line.trim_end().strip_prefix("data: ") {
                    return Ok(Some((data.to_owned(), (frames, buffer))));
                }
            } else if let Some(frame) = frames.try_next().await? {
                buffer.extend_from_slice(&frame);
            } else {
                return Ok::<_, BoxError>(None);
            }
        }
    });
    events.boxed()
}
